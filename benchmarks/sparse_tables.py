"""Write docs/sparse-results.md from the studies in benchmarks/results/sparse: ``python benchmarks/sparse_tables.py``.

The studies come from ``tilestream sparse reproduce --out benchmarks/results/sparse``; the last two from
``python benchmarks/sparse_cpu.py --part graphs --out benchmarks/results/sparse`` and ``--part pyg``.
"""

from __future__ import annotations

from pathlib import Path

from prose import wrapped

from tilestream.sparse.reproduce import STUDIES, Study

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sparse"
PAGE = ROOT / "docs" / "sparse-results.md"
HEAD = ROOT / "benchmarks" / "sparse_head.md"


def page() -> str:
    """The whole document: what was written by hand, then a section a study; its prose wrapped."""
    studies = [
        Study.read(RESULTS / f"{name}.json")
        for name in (*STUDIES, "cpu", "cpu_pyg")
        if (RESULTS / f"{name}.json").is_file()
    ]
    return wrapped(HEAD.read_text(encoding="utf-8") + "\n" + "\n".join(study.markdown() for study in studies))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write docs/sparse-results.md from the studies in benchmarks/results/sparse (``-m benchmarks.tables.sparse_tables``).

The studies come from ``tilestream sparse reproduce --out benchmarks/results/sparse``; the last three from
``python -m benchmarks.run.sparse_cpu --part graphs --out benchmarks/results/sparse``, ``--part pyg``, and
``python -m benchmarks.run.sparse_gpu --out benchmarks/results/sparse``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.tables.prose import wrapped
from tilestream.sparse.reproduce import STUDIES, Study

FOLDER = RESULTS / "sparse"
PAGE = DOCS / "sparse-results.md"
HEAD = Path(__file__).with_name("sparse_head.md")


def page() -> str:
    """The whole document: what was written by hand, then a section a study; its prose wrapped."""
    studies = [
        Study.read(FOLDER / f"{name}.json")
        for name in (*STUDIES, "cpu", "cpu_pyg", "gpu")
        if (FOLDER / f"{name}.json").is_file()
    ]
    return wrapped(HEAD.read_text(encoding="utf-8") + "\n" + "\n".join(study.markdown() for study in studies))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

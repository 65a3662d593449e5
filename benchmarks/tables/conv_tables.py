"""Write the tables of docs/convolutions.md, and that of whole networks in docs/results.md, from ``benchmarks/results``.

python -m benchmarks.run.conv_chains
python -m benchmarks.tables.conv_tables
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

from benchmarks.lib.marked import table, us, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from tilestream.studies.flashfuser.measured import ran

PAGES = {DOCS / "convolutions.md": ("chains", "kernels"), DOCS / "results.md": ("networks",)}
"""Each page and the marked parts that it must have, once."""
OTHERS = {"eager": "eager", "inductor": "Inductor", "max-autotune": "max-autotune"}
WHAT = {
    "C1": "C1: 1 x 1 64-256, 1 x 1 256-64, 56 x 56",
    "C2": "C2: 1 x 1 128-512, 1 x 1 512-128, 28 x 28",
    "C3": "C3: 1 x 1 256-1024, 1 x 1 1024-256, 14 x 14",
    "C4": "C4: 1 x 1 512-2048, 1 x 1 2048-512, 7 x 7",
    "C5": "C5: 3 x 3 64-64, 1 x 1 64-256, 56 x 56",
    "C7": "C7: 3 x 3 256-256, 1 x 1 256-1024, 14 x 14",
    "C8": "C8: 3 x 3 512-512, 1 x 1 512-2048, 7 x 7",
    "tail56": "C5 with norms and residual",
    "tail28": "3 x 3 128-128, 1 x 1 128-512, norms, residual, 28 x 28",
    "resnet50": "ResNet-50, 224 x 224",
}
NETWORKS = ("resnet50",)

Case = tuple[str, int]


def cases() -> dict[Case, dict[str, dict[str, Any]]]:
    """Rows of the results by workload and images, then by arm; in the order of ``WHAT``."""
    found: dict[Case, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "conv_chains.json").read_text(encoding="utf-8"))["rows"]:
        found.setdefault((row["workload"], row["images"]), {})[row["arm"]] = row
    return dict(sorted(found.items(), key=lambda c: (list(WHAT).index(c[0][0]), c[0][1])))


def speedup(arms: dict[str, dict[str, Any]]) -> float:
    """The best of the others over ours."""
    return min(arms[name]["us"] for name in OTHERS if name in arms) / arms["tilestream"]["us"]


def chains() -> str:
    """Microseconds of every arm, and the geometric mean of C1 to C8."""
    lines, gains = [], []
    for (name, images), arms in cases().items():
        if "tilestream" not in arms:
            continue
        gain = speedup(arms)
        gains += [gain] if name.startswith("C") else []
        times = [us(arms[arm]["us"]) if arm in arms else "-" for arm in (*OTHERS, "tilestream")]
        lines.append([WHAT[name], str(images), *times, f"{gain:.2f}", runs(name, arms["tilestream"]["detail"])])
    mean = prod(gains) ** (1 / len(gains)) if gains else 0.0
    made = table(["us", "images", *OTHERS.values(), "tilestream", "times", "what runs"], lines)
    return f"{made}\n\nC1 to C8: {mean:.2f} times the best of the others (geometric mean of {len(gains)} cases)."


def networks() -> str:
    """Microseconds of every arm of whole networks, and the gain."""
    lines = []
    for (name, images), arms in cases().items():
        if name not in NETWORKS:
            continue
        times = [us(arms[arm]["us"]) if arm in arms else "-" for arm in OTHERS]
        lines.append([WHAT[name], str(images), *times, f"**{us(arms['tilestream']['us'])}**", f"{speedup(arms):.2f}"])
    return table(["network (bf16, channels last)", "images", *OTHERS.values(), "tilestream", "gain"], lines)


def runs(name: str, detail: str) -> str:
    """What each region became, as the planner names it; a product by itself is Inductor's."""
    return "by region" if name in NETWORKS else ran(detail)


def kernels() -> str:
    """Microseconds by kernel, a column for each workload and number of images."""
    rows = json.loads((RESULTS / "conv_kernels.json").read_text(encoding="utf-8"))["rows"]
    found = {(r["kernel"], r["workload"], r["images"]): us(r["us"]) for r in rows}
    cases = dict.fromkeys((name, images) for _, name, images in found)
    heads = ["us", *(f"{name}, {images}" for name, images in cases)]
    names = dict.fromkeys(kernel for kernel, _, _ in found)
    return table(heads, [[kernel, *(found.get((kernel, *case), "-") for case in cases)] for kernel in names])


def filled(text: str, parts: Sequence[str]) -> str:
    """``text`` of a page with its marked parts rewritten.

    Raises:
        ValueError: a marker is missing.
    """
    made = {"chains": chains, "kernels": kernels, "networks": networks}
    return with_parts(text, {part: made[part]() for part in parts}, "tables/conv_tables.py", "the page")


if __name__ == "__main__":
    for page, parts in PAGES.items():
        page.write_text(filled(page.read_text(encoding="utf-8"), parts), encoding="utf-8")

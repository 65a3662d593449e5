"""What was measured of the paper's shapes, where its files are: variants of a kernel, and blocks against others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilestream.errors import OptionError
from tilestream.kernels.product.sharing import Middle, Tail
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.hand_written import HandWritten

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
"""Of a checkout; an installed package has none, and its tables say so."""

LIBRARY = {
    "": "the better of F.linear, relu, F.linear and torch._addmm_activation, in a CUDA graph",
    "S2": "eager in a CUDA graph, four kernels: a weak baseline",
}
"""What the variants were timed against."""

FIT = ("G4", "G8")
"""Shapes that the constants of the cost model were fitted on. All others judge it."""


@dataclass(frozen=True)
class Variant:
    """One kernel that was timed: microseconds with the weights in the L2 (where they fit), and from DRAM."""

    shape: str
    chain: Chain
    variant: HandWritten
    warm_us: float
    cold_us: float
    sync: str

    @property
    def held_out(self) -> bool:
        return self.shape not in FIT


def _file(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


TAILS = {"store": Tail.NONE, "add": Tail.REDUCE_ADD, "dsm": Tail.CLUSTER} | {t.value: t for t in Tail}
"""As the file says them."""


@cache
def variants() -> tuple[Variant, ...]:
    """Every timed variant of ``ffn_variants.json``; none without the file."""
    data = _file("ffn_variants.json")
    made = []
    for row in data.get("rows", ()):
        s = data["shapes"][row["shape"]]
        gate = Gate.SEQUENTIAL if s["gated"] else Gate.NONE
        chain = Chain(row["shape"], s["m"], s["n"], s["k"], s["l"], gate)
        shared = HandWritten(
            128,
            row["groups"],
            row["columns"],
            row["block_n"],
            row["block_l"],
            Middle(row["middle"]),
            TAILS[row["tail"]],
            row["multicast"],
            row["depth"],
            row["depth2"],
            row["stages"],
            row["weight_stages"],
            row["slots"],
        )
        made.append(Variant(row["shape"], chain, shared, row["warm_us"], row["cold_us"], row["sync"]))
    return tuple(made)


CLOCKS = ("product0", "c_back", "product1", "end")
"""Ends of phases that the kernels' own clocks told: the first product, C back, the second product, all."""


def clocks() -> dict[str, tuple[Variant, tuple[float, ...]]]:
    """Of some shapes a variant, and when each of ``CLOCKS`` was over: microseconds from its CTAs' start, mean."""
    found = {}
    for shape, told in _file("ffn_variants.json").get("clocks", {}).items():
        if isinstance(told, dict):
            found[shape] = (variants()[told["row"]], tuple(told[name] for name in CLOCKS))
    return found


def library(shape: str) -> tuple[float, float] | None:
    """The best library kernels' times of a shape, warm and cold, as they were timed beside the variants."""
    found = _file("ffn_variants.json").get("library", {}).get(shape)
    return None if found is None else (found["warm_us"], found["cold_us"])


ROWS = 128
"""Of the paper's workloads."""


def few_rows(folder: Path | None = None) -> list[dict[str, Any]]:
    """All arms of ``few_rows.json``, ours and others, of a folder that is given, or of the checkout, if it has any.

    Raises:
        OptionError: the given folder has no such file, or one that ``benchmarks/run/few_rows.py`` has not written.
    """
    path = (folder or RESULTS) / "few_rows.json"
    if folder is not None and not path.is_file():
        raise OptionError(f"--results {folder} has no {path.name}", "benchmarks/run/few_rows.py makes it on a GPU")
    return _rows(path)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results; none without the file.

    Raises:
        OptionError: its benchmark has not written it.
    """
    remedy = f"benchmarks/run/{path.stem}.py makes it on a GPU"
    if not path.is_file():
        return []
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{path} is no JSON: {error}", remedy) from error
    if not (isinstance(made, dict) and "rows" in made):
        raise OptionError(f"{path} has no rows of measurements", remedy)
    return made["rows"]


def ours(shape: str, folder: Path | None = None) -> dict[str, Any] | None:
    """What ``few_rows.json`` says of a workload at ``ROWS`` rows, warm: ``ours_us`` of the best ``variant`` of a
    generated kernel, ``best_other_us`` of ``other``; None if not measured."""
    rows = [r for r in few_rows(folder) if (r["workload"], r["rows"]) == (shape, ROWS)]
    kernels = [r for r in rows if is_ours(r["arm"])]
    others = [r for r in rows if not r["arm"].startswith(("shared", "tilestream"))]
    if not kernels or not others:
        return None
    best, other = (min(some, key=lambda r: r["warm_us"]) for some in (kernels, others))
    return {
        "ours_us": best["warm_us"],
        "best_other_us": other["warm_us"],
        "other": other["arm"],
        "variant": best["arm"],
    }


def is_ours(arm: str) -> bool:
    """Whether an arm of ``few_rows.json`` is a kernel of ours, launched as the others are."""
    return arm.startswith("shared") and not arm.endswith("dependent launch")


def pixels(shape: str, images: int, folder: Path | None = None) -> dict[str, Any] | None:
    """What ``conv_chains.json`` says of a chain of convolutions through ``torch.compile``, warm: ``ours_us`` and what
    ran as ``variant``, ``best_other_us`` of ``other``; None if not measured."""
    rows = _rows((folder or RESULTS) / "conv_chains.json")
    arms = {r["arm"]: r for r in rows if (r["workload"], r["images"]) == (shape, images)}
    if "tilestream" not in arms or len(arms) < 2:
        return None
    own = arms.pop("tilestream")
    other = min(arms.values(), key=lambda r: r["us"])
    return {
        "ours_us": own["us"],
        "best_other_us": other["us"],
        "other": other["arm"],
        "variant": ran(own["detail"]),
    }


LIBRARYS = ("fallback", "a product by itself")
"""How details of a compiled model begin where Inductor, or a library's kernel in its code, runs a region."""


def ran(detail: str) -> str:
    """What each region of a compiled model became, as the planner names it."""
    each = ("Inductor" if region.startswith(LIBRARYS) else region for region in detail.split("; "))
    return "; ".join(dict.fromkeys(each))

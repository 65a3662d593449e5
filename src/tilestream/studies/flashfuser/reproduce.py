"""The evaluation of the FlashFuser paper as one call: its search space, its workloads, its ablation, beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from tilestream import devices
from tilestream.devices import Device
from tilestream.errors import OptionError, PlanError
from tilestream.studies.flashfuser import measured, paper
from tilestream.studies.flashfuser.ablation import ablation, summary
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.pixels import IMAGES, Pixels, predicted
from tilestream.studies.flashfuser.search import minmax, rules
from tilestream.studies.flashfuser.search.kernels import search
from tilestream.studies.flashfuser.truth import Score, judged, phases
from tilestream.studies.flashfuser.workload import Row, workload_json

MEASURED_ON = "h200"
"""The nearest to the paper's H100 that was measured: other devices have no measured columns."""


@dataclass(frozen=True)
class Reproduction:
    """All that was run."""

    device: str
    rows: tuple[Row, ...]
    counts: tuple[rules.Step, ...]
    scores: tuple[Score, ...]
    seconds: float

    def json(self) -> dict[str, Any]:
        """``rules``, ``readings``, ``workloads``, ``ablation``, ``claims``, ``model``, ``missing`` and
        ``inconsistent``."""
        return {
            "device": self.device,
            "seconds": self.seconds,
            "rules": [
                {"rule": s.rule, "what": s.what, "ours": s.ours, "paper": s.paper, "agrees": s.agrees}
                | {"factors": s.factors}
                for s in self.counts
            ],
            "readings": [
                {"rule": rule, "reading": what, "ours": count(), "implied": implied}
                for rule, what, count, implied in rules.READINGS
            ],
            "workloads": [workload_json(r, devices.get(self.device)) for r in self.rows],
            "ablation": self.ablation(),
            "claims": self.claims(),
            "model": [
                {**s.__dict__, "middle": str(s.middle), "measured_middle": str(s.measured_middle)} for s in self.scores
            ],
            "phases": phases(),
            "missing": [{"what": what, "paper": stated, "why": why} for what, stated, why in paper.MISSING],
            "inconsistent": list(paper.INCONSISTENT),
        }

    def ablation(self) -> list[dict[str, Any]]:
        """Speedups over two kernels by arm, geometric means over the paper's GEMM chains, and over everything."""
        made = {r.workload.key: r.ablation for r in self.rows if r.ablation is not None}
        groups = {
            "GEMM chains": [a for key, a in made.items() if key[0] == "G"],
            "all workloads": list(made.values()),
        }
        return [{"over": name, **summary(arms), "paper": paper.ABLATION} for name, arms in groups.items() if arms]

    def claims(self) -> list[dict[str, Any]]:
        """Averages that the paper states, beside what was measured, and what the model and bytes say."""
        found = []
        for family, stated in paper.SPEEDUPS.items():
            rows = [r for r in self.rows if r.workload.family == family]
            if rows:
                found.append(_speedup(f"{family}: speedup over PyTorch", stated, rows))
        if self.rows:
            found.append(_speedup("all workloads: speedup over libraries", paper.LIBRARIES, self.rows))
            saved = mean(r.saved for r in self.rows)
            found.append(_claim("DRAM bytes saved", 1 - 1 / paper.TRAFFIC, None, saved, "share", TRAFFIC_WHY))
        return found


SPEEDUP_WHY = (
    "Measured: over the best of eager, cuBLAS, Inductor and max-autotune, all in CUDA graphs, weights in the L2 where"
    " they fit. By the model: over two kernels in a CUDA graph, without convolutions as row streams. The paper does not"
    " say that its baselines ran in graphs; PyTorch without them spends 5 us and more a kernel on the host."
)
TRAFFIC_WHY = (
    "Mean over the workloads of what no kernel can beat: C written and read once, in DRAM. In truth C of all but the"
    " largest stays in the L2, so that even two kernels move fewer bytes of DRAM."
)


def reproduce(
    device: str = MEASURED_ON,
    workloads: Iterable[str] = (),
    results: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Reproduction:
    """Run the workloads of these keys (all of Tables V to VII if empty) on ``device``. Needs no GPU.

    Args:
        results: a folder with ``few_rows.json``, measured times, and ``conv_chains.json``, those of convolutions, if
            there are any; the checkout's own if None.

    Raises:
        OptionError: no workload has that key, or the folder has no measured times.
        DeviceError: the device is unknown.
    """
    started = time.perf_counter()
    chosen = named(workloads)
    measured.few_rows(results)  # what is wrong with them is told before the searches take their time
    machine = devices.get(device)
    progress("counting the search space")
    counts = tuple(rules.counts(rules.PAPERS_EXAMPLE, machine))
    rows = tuple(row(w, machine, results, progress) for w in chosen)
    progress("judging the cost model")
    return Reproduction(machine.name, rows, counts, tuple(judged()), time.perf_counter() - started)


def named(keys: Iterable[str]) -> list[paper.Workload]:
    """Workloads by key, in the paper's order."""
    keys = [k.upper() for k in keys]
    known = {w.key for w in paper.WORKLOADS}
    for key in keys:
        if key not in known:
            raise OptionError(f"the paper has no workload {key!r}", f"use some of: {', '.join(sorted(known))}")
    return [w for w in paper.WORKLOADS if not keys or w.key in keys]


def row(w: paper.Workload, machine: Device, results: Path | None, progress: Callable[[str], None]) -> Row:
    """Both searches of one workload, its ablation, and its measured times."""
    progress(f"{w.key}: the paper's search")
    papers = {}
    for name, chain in mappings(w.chain).items():
        before = time.perf_counter()
        papers[name] = (minmax.best(chain, machine), time.perf_counter() - before)
    progress(f"{w.key}: the compiler's search")
    try:
        ours = search(w.chain, machine)
    except PlanError:
        ours = None
    return Row(
        w,
        papers,
        ours,
        ablation(ours, machine) if ours is not None else None,
        timed(w.key, results) if machine.name == MEASURED_ON else None,
        tuple(of_pixels(w, n, machine, results) for n in IMAGES) if w.chain.image is not None else (),
    )


def of_pixels(w: paper.Workload, images: int, machine: Device, results: Path | None) -> Pixels:
    """A chain of convolutions over some images, predicted and, on the device that was measured, timed."""
    made = predicted(w.chain, images, machine)
    return replace(made, timed=measured.pixels(w.key, images, results)) if machine.name == MEASURED_ON else made


def mappings(chain: Chain) -> dict[str, Chain]:
    """A gated chain in both of the paper's ways, another in the one it has."""
    if chain.gate is Gate.NONE:
        return {"none": chain}
    return {gate.value: replace(chain, gate=gate) for gate in (Gate.SPATIAL, Gate.SEQUENTIAL)}


def timed(key: str, results: Path | None = None) -> dict[str, Any] | None:
    """Measured times of a workload: of generated kernels if there are any, else of the best hand-written variant."""
    found = measured.ours(key, results)
    if found is not None:
        return {**found, "source": "few_rows.json, a generated kernel"}
    chain = measured.pixels(key, 1, results)  # the paper's workloads are of one image
    if chain is not None:
        return {**chain, "source": "conv_chains.json, through torch.compile"}
    rows: Sequence[measured.Variant] = [v for v in measured.variants() if v.shape == key]
    others = measured.library(key)
    if not rows or others is None:
        return None
    best = min(rows, key=lambda v: v.warm_us)
    return {
        "ours_us": best.warm_us,
        "best_other_us": others[0],
        "other": measured.LIBRARY.get(key, measured.LIBRARY[""]),
        "variant": str(best.variant),
        "source": "ffn_variants.json, a hand-written kernel",
    }


def _speedup(what: str, stated: float | None, rows: Sequence[Row]) -> dict[str, Any]:
    """A speedup that the paper states of these rows: geometric means of what was measured, and by the model."""
    timed = [r.timed["best_other_us"] / r.timed["ours_us"] for r in rows if r.timed is not None]
    arms = [r.ablation for r in rows if r.ablation is not None]
    by_model = summary(arms)["with L2"] if arms else None
    return _claim(what, stated, geometric_mean(timed) if timed else None, by_model, "x", SPEEDUP_WHY)


def _claim(
    what: str, stated: float | None, measured_: float | None, model: float | None, unit: str, why: str
) -> dict[str, Any]:
    return {"what": what, "paper": stated, "measured": measured_, "model": model, "unit": unit, "why": why}

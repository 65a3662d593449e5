"""The paper's figures from our own runs: one function a group of figures, keyed as ``paper.FIGURES`` is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tilestream.studies.kitsune.outcome import Outcome, Region, fused_share, geomean, mean, regions
from tilestream.studies.kitsune.paper import INFERENCE, TRAINING

BASE, SMS, DRAM, BOTH = "base", "2x SMs, L2", "2x DRAM", "2x all"
"""Variants of the device in the sensitivity study."""
REUSE = "L2 reuse"
"""The base, with launches credited for what the L2 keeps from those before them."""

BULK, VERTICAL, KITSUNE = "bulk", "vertical", "kitsune"
"""What is run on each variant."""
KITSUNE_FIFO, WHOLE, MIXED = "kitsune, one arbiter", "whole", "mixed"
"""On the base alone: Kitsune's pipelines on the grid scheduler of today; whole MLPs in one vertical kernel each, as
this compiler fuses; and the best of all this."""

EXECUTIONS_SHOWN = (BULK, VERTICAL, KITSUNE, KITSUNE_FIFO, WHOLE, MIXED)


@dataclass(frozen=True)
class RowRuns:
    """All runs of one row of Table 2: ``runs[variant, execution]``.

    Traffic is the design's own count of off-chip bytes by execution, before any effect of a cache; of vertical fusion
    as ``table2`` counts it.
    """

    app: str
    mode: str
    operators: int
    fused: Mapping[str, int]
    traffic: Mapping[str, float]
    runs: Mapping[tuple[str, str], Outcome]
    unfused: Mapping[str, str] = field(default_factory=dict)
    """Operators that Kitsune leaves alone, and why."""
    other_counts: Mapping[str, float] = field(default_factory=dict)
    """Of a training graph: percent of traffic saved, counted otherwise (``table2.other_counts``)."""

    @property
    def key(self) -> str:
        return f"{self.app} {self.mode}"

    def time(self, execution: str, variant: str = BASE) -> float:
        return self.runs[variant, execution].time_s

    def speedup(self, execution: str = KITSUNE, variant: str = BASE) -> float:
        """Times as fast as bulk on the same variant."""
        return self.time(BULK, variant) / self.time(execution, variant)

    def gain(self, execution: str, variant: str) -> float:
        """Percent that ``execution`` gains from the variant's hardware."""
        return 100 * (self.time(execution) / self.time(execution, variant) - 1)

    def reduction(self, execution: str) -> float:
        """Percent of bulk's off-chip bytes that ``execution`` saves."""
        return 100 * (1 - self.traffic[execution] / self.traffic[BULK])

    def regions(self, variant: str = BASE) -> tuple[Region, ...]:
        return regions(self.runs[variant, BULK], self.runs[variant, KITSUNE])

    def fused_share(self, phase: str | None = None) -> float:
        """Percent of the bulk time in operators that Kitsune runs in pipelines."""
        return 100 * fused_share(self.runs[BASE, BULK], self.regions(), phase)


Span = tuple[float, float]


def figures(rows: Iterable[RowRuns]) -> dict[str, Span]:
    """Our values, as (low, high), of every figure that the given rows suffice for."""
    rows = list(rows)
    by_key = {r.key: r for r in rows}
    found: dict[str, Span] = {}
    for part in (_inference, _training):
        found.update(part(by_key))
    for mode in (INFERENCE, TRAINING):
        of_mode = [r for r in rows if r.mode == mode]
        if of_mode:
            found.update(_traffic(mode, of_mode))
            found.update(_low(mode, of_mode))
            found.update(_sensitivity(mode, of_mode))
    return found


def _one(value: float) -> Span:
    return value, value


def _range(values: Iterable[float]) -> Span:
    values = list(values)
    return min(values), max(values)


def _inference(by_key: Mapping[str, RowRuns]) -> Iterator[tuple[str, Span]]:
    rows = [r for r in by_key.values() if r.mode == INFERENCE]
    if not rows:
        return
    fused = [x.speedup for r in rows for x in r.regions()]
    if fused:
        yield "inference_regions", _range(fused)
        yield "inference_regions_geomean", _one(geomean(fused))
    speedups = [r.speedup() for r in rows]
    yield "inference_geomean", _one(geomean(speedups))
    yield "inference_range", _range(speedups)
    yield "inference_most", _one(max(speedups))
    yield "inference_share", _one(min(r.fused_share() for r in rows))
    yield "vertical_geomean", _one(geomean([r.speedup(VERTICAL) for r in rows]))
    if row := by_key.get(f"mgn {INFERENCE}"):
        yield "vertical_best", _one(row.speedup(VERTICAL))
    if row := by_key.get(f"nerf {INFERENCE}"):
        yield "nerf_inference", _one(row.speedup())
    if row := by_key.get(f"llama_prefill {INFERENCE}"):
        if row.regions():
            yield "llama_prefill_regions", _range(x.speedup for x in row.regions())
        yield "llama_prefill_share", _one(row.fused_share())
        yield "llama_prefill_e2e", _one(row.speedup())


def _training(by_key: Mapping[str, RowRuns]) -> Iterator[tuple[str, Span]]:
    rows = [r for r in by_key.values() if r.mode == TRAINING]
    if not rows:
        return
    speedups = [r.speedup() for r in rows]
    yield "training_range", _range(speedups)
    yield "training_most_v1", _one(max(speedups))
    yield "training_most", _one(max(speedups))
    bulk = [r.runs[BASE, BULK] for r in rows]
    yield "backward_time", _one(geomean([x.phase_s("backward") / x.phase_s("forward") for x in bulk]))
    yield "backward_share", _one(mean([r.fused_share("backward") - r.fused_share("forward") for r in rows]))


def _traffic(mode: str, rows: list[RowRuns]) -> Iterator[tuple[str, Span]]:
    saved = [r.reduction(KITSUNE) for r in rows if r.app != "llama_decode"]
    if saved:  # decoding reads weights once and saves nothing: the abstract leaves it out
        yield f"{mode}_traffic", _range(saved)
        yield f"{mode}_traffic_most", _one(max(saved))


def _low(mode: str, rows: list[RowRuns]) -> Iterator[tuple[str, Span]]:
    bulk = {r.app: r.runs[BASE, BULK].quadrants() for r in rows}
    kitsune = {r.app: r.runs[BASE, KITSUNE].quadrants() for r in rows}
    others = [100 * bulk[a].both_low for a in ("graphcast", "mgn", "nerf") if a in bulk]
    if others:
        yield f"low_motivation_{mode}", _range(others)
    for app, name in (("dlrm", "dlrm"), ("llama_prefill", "llama")):
        if app in bulk:
            yield f"low_{name}_{mode}", _one(100 * bulk[app].both_low)
    for name, quadrants in (("bulk", bulk), ("kitsune", kitsune)):
        yield f"low_{name}_{mode}", _one(100 * mean([q.both_low for q in quadrants.values()]))
        yield f"dram_low_{name}_{mode}", _one(100 * mean([q.only_dram_low for q in quadrants.values()]))


def _sensitivity(mode: str, rows: list[RowRuns]) -> Iterator[tuple[str, Span]]:
    for variant, name in ((SMS, "sms"), (DRAM, "dram"), (BOTH, "both")):
        for execution in (BULK, VERTICAL, KITSUNE):
            have = [r for r in rows if (variant, execution) in r.runs]
            if have:
                gains = [1 + r.gain(execution, variant) / 100 for r in have]
                yield f"{name}_{execution}_{mode}", _one(100 * (geomean(gains) - 1))

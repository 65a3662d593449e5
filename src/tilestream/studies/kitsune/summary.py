"""The paper's figures from our own runs: one function a group of figures, keyed as ``paper.FIGURES`` is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tilestream import devices
from tilestream.devices import Device
from tilestream.studies.kitsune.outcome import Outcome, Region, fused_share, geomean, mean, regions
from tilestream.studies.kitsune.paper import INFERENCE, TRAINING

BASE, SMS, DRAM, BOTH = "base", "2x SMs, L2", "2x DRAM", "2x all"
"""Variants of the device in the sensitivity study."""
REUSE = "L2 reuse"
"""The base, with launches credited for what the L2 keeps from those before them."""
OLDER = "40 GB"
"""The A100 of 40 GB in place of the one of 80 GB: the paper does not say which it has."""
VARIANTS: dict[str, str] = {
    BASE: "",
    SMS: "+sms*2+l2_bytes_per_s*2",
    DRAM: "+dram_bytes_per_s*2",
    BOTH: "+sms*2+l2_bytes_per_s*2+dram_bytes_per_s*2",
    REUSE: "",
    OLDER: "+dram_bytes_per_s*0.763",
}
"""The sensitivity study (paper, Figs. 10 and 12), as variants of a device's name, the base with a warm L2, and the
other A100: 1,555 of 2,039 GB/s by their data sheets."""

BULK, VERTICAL, KITSUNE = "bulk", "vertical", "kitsune"
"""What is run on each variant."""
KITSUNE_FIFO, WHOLE, MIXED = "kitsune, one arbiter", "whole", "mixed"
"""On the base alone: Kitsune's pipelines on the grid scheduler of today; whole MLPs in one vertical kernel each, as
this compiler fuses; and the best of all this."""

Span = tuple[float, float]

EXECUTIONS_SHOWN = (BULK, VERTICAL, KITSUNE, KITSUNE_FIFO, WHOLE, MIXED)


def variant_of(device: str, variant: str, dual: bool) -> Device:
    """The device with a variant's hardware, and Kitsune's two arbiters or as many as it has."""
    return devices.get(device + variant + ("+kitsune" if dual else ""))


@dataclass(frozen=True)
class Other:
    """A row of Table 2 as it is by another choice than ours: its columns, and speedups over bulk."""

    what: str
    operators: int
    fused_vertical: int
    fused_kitsune: int
    traffic_vertical: float
    traffic_kitsune: float
    speedup_vertical: float
    speedup: float


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
    others: tuple[Other, ...] = ()
    """The row by other choices (``choices.others``)."""
    low: Mapping[str, Span] = field(default_factory=dict)
    """Share of bulk's and Kitsune's time with SM and DRAM both low, by how it is counted (``low.causes``)."""

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


def low_means(rows: Iterable[RowRuns]) -> dict[str, dict[str, Span]]:
    """By mode and cause, the mean over rows of the percent of time with SM and DRAM both low: bulk's and Kitsune's."""
    found: dict[str, dict[str, Span]] = {}
    for mode in (INFERENCE, TRAINING):
        of_mode = [r.low for r in rows if r.mode == mode and r.low]
        for cause in of_mode[0] if of_mode else ():
            bulk, kitsune = (100 * mean([low[cause][i] for low in of_mode]) for i in (0, 1))
            found.setdefault(mode, {})[cause] = (bulk, kitsune)
    return found


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
        if (OLDER, KITSUNE) in row.runs:
            yield "nerf_inference_40gb", _one(row.speedup(KITSUNE, OLDER))
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
    means = {name: 100 * mean([q.both_low for q in of.values()]) for name, of in (("bulk", bulk), ("kitsune", kitsune))}
    yield f"low_fall_{mode}", _one(means["bulk"] - means["kitsune"])
    for name, quadrants in (("bulk", bulk), ("kitsune", kitsune)):
        yield f"low_{name}_{mode}", _one(means[name])
        yield f"dram_low_{name}_{mode}", _one(100 * mean([q.only_dram_low for q in quadrants.values()]))


def _sensitivity(mode: str, rows: list[RowRuns]) -> Iterator[tuple[str, Span]]:
    for variant, name in ((SMS, "sms"), (DRAM, "dram"), (BOTH, "both")):
        for execution in (BULK, VERTICAL, KITSUNE):
            have = [r for r in rows if (variant, execution) in r.runs]
            if have:
                gains = [1 + r.gain(execution, variant) / 100 for r in have]
                yield f"{name}_{execution}_{mode}", _one(100 * (geomean(gains) - 1))

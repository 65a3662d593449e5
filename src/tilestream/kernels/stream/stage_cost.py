"""What one step of a stage asks of its SM, at the rates of a device: from its schedule and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log2

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Residency, Stage, Transport
from tilestream.ir.sizes import Phase, phases, weight_bytes
from tilestream.kernels.costs import Amount, Counts, beside
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.counts import (
    WARPGROUP,
    EpilogueCounts,
    StepCounts,
    code_apart,
    code_size,
    counts,
    scattered_bytes,
)
from tilestream.kernels.stream.input_ring import takes_of, waits
from tilestream.kernels.stream.layout import Layout, lay_out
from tilestream.kernels.stream.model import Schedule

INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class StageCost:
    """What a stage asks for on one SM; the cost model and the simulator's event loop both read it.

    Attributes:
        step: from one step to the next. Parts by name, at any depth: ``products``, wgmma of all tiles of the step
            beside what shared memory carries for them; ``epilogues`` of one warpgroup, each instruction behind the one
            before; ``issue``, those of both if nothing ever waited; ``inputs``, waits as the input ring is too short
            for them to be on their way in time; ``weights`` that are streamed, through the SM's port; ``code`` that
            the instruction cache does not hold; ``queue``, the exposed part of the hand-over of the step's input.
        first_s: what the first tile waits for its inputs beyond that, and a second launch takes.
        scattered: bytes of the L2 a step beyond those of the values, for stores of parts of sectors.
    """

    step: Counts
    first_s: float = 0.0
    scattered: float = 0.0

    @property
    def step_s(self) -> float:
        return self.step.seconds


def stage_cost(stage: Stage, pipeline: Pipeline, device: Device, loading: int | None = None) -> StageCost:
    """One step of ``stage`` on one SM. Whether it fits there is not looked at.

    Args:
        loading: CTAs that share the DRAM's rate; None for all replicas, or a CTA an SM where none have been dealt out.

    A stage of which no kernel can be made (dtypes mixed, too wide) still runs on the reference machine and in the
    simulator: its products and its lanes' work are taken one after the other.
    """
    streamed = stage.residency is Residency.STREAMED
    weights = Amount("weights", weight_bytes(stage, pipeline) if streamed else 0, device.sm_bytes_per_s)
    queue = Amount("queue", device.queue_exposed * max(taken_s(stage, pipeline, device), default=0.0))

    def step_of(*at_once: Counts | Amount) -> Counts:
        return Counts("step", (Counts("at once", (*at_once, weights), max), queue))

    try:
        schedule = build(stage, pipeline)
    except VerifyError:
        work = phases(stage, pipeline)
        parts = (("products", tensor_s), ("epilogues", lane_s))
        alone = [Amount(name, stage.tiles_per_step * sum(of(p, device) for p in work)) for name, of in parts]
        return StageCost(step_of(Counts("compute", (*alone, Amount("inputs", 0.0)))))
    layout = lay_out(schedule, device.shared_bytes_per_cta)
    split = stage.placement.dim == 1
    sm = _Sm(device, schedule.dtype, split, code_size(schedule, layout))
    steps = counts(schedule, layout)
    products = Counts("products", tuple(map(sm.product, steps)))
    passes = [[sm.pass_s(p) for p in s.passes] for s in steps]
    turns = [sm.turns_s(s) for s in steps]
    before = [p.seconds / (1 if split else 2) + turn for p, turn in zip(products.parts, turns, strict=True)]
    if loading is None:
        loading = stage.replicas if stage.replicas > 1 else device.sms
    takes = takes_of(schedule, pipeline, before, passes, device, loading)
    inputs_s, first_s = waits(takes, layout.in_slots, device)
    pages_s = sum(sm.page_wait_s(s, layout, stage.in_flight) for s in steps) if streamed else 0.0
    rows_s = device.again_s * any(s.own_rows is not None for s in schedule.steps)  # one behind another, side by side
    waited = (Amount("inputs", inputs_s + rows_s), Amount("pages", pages_s), Amount("turns", sum(turns)))
    parts = (
        products,
        Amount("epilogues", sum(sum(each) for each in passes)),
        Counts("issue", tuple(map(sm.issue, steps))),
        Counts("waits", waited),
    )
    # One's epilogue runs beside the other's products, as far as the ring of weights lets one run ahead. By columns both
    # work on one tile: nothing runs beside the epilogue.
    ahead = 1.0 if not streamed else _ahead(steps, [p.seconds for p in products.parts], layout)
    together = Counts("warpgroups", parts, partial(_warpgroups, None if split else ahead))
    return StageCost(
        step_of(
            Counts("compute", (together, Amount("joining", joining_s(schedule, device)))),
            sm.fetched(1.0 if split else code_apart(schedule, layout)),
        ),
        first_s + joining_nodes_s(stage, device),
        scattered_bytes(schedule, pipeline),
    )


def _warpgroups(ahead: float | None, seconds: Sequence[float]) -> float:
    """Of products of both warpgroups, epilogues of one, instructions of both, and waits; ``ahead``: the share of the
    products during which one can be an epilogue ahead of the other, None where they go side by side."""
    products, epilogues, issue, waited = seconds
    together = products + max(epilogues, issue) + waited
    if ahead is None:
        return together
    apart = beside((products / 2 + epilogues + waited, products, issue))
    return ahead * apart + (1 - ahead) * together


def tensor_s(phase: Phase, device: Device) -> float:
    """One tile on the tensor cores of an SM."""
    return phase.flops / (device.tensor_flops[phase.dtype] / device.sms)


def lane_s(phase: Phase, device: Device) -> float:
    """One tile on all lanes of an SM, if nothing ever waited: arithmetic and special functions side by side."""
    ops = phase.lane_ops + device.handoff_ops * phase.handed
    return max(ops / (device.simt_flops / device.sms), phase.sfu_ops / (device.sfu_ops_per_s / device.sms))


def taken_s(stage: Stage, pipeline: Pipeline, device: Device) -> list[float]:
    """Seconds of the hand-over of each tile that ``stage`` takes from an L2 queue."""
    tiles = pipeline.tiles()
    return [
        device.queue_s(stage.tile_rows * tiles[q.tile].row_bytes)
        for q in pipeline.queues
        if stage.name in q.consumers and q.transport is Transport.L2
    ]


def joining_nodes_s(stage: Stage, device: Device) -> float:
    """Seconds of the launch for nodes whose rows cross tiles: it reads where they start, then what tiles left."""
    if not any(op.receivers for op in stage.ops):
        return 0.0
    return device.launch_s + device.ramp_s + 2 * device.load_s


def joining_s(schedule: Schedule, device: Device) -> float:
    """Seconds until the parts of a product's operand that come from several queues are there, beyond one part's: they
    come through the same port, one after another."""
    rows, longest = schedule.stage.tile_rows, 0.0
    for step in schedule.steps:
        segments = step.gemm.segments if step.gemm is not None else ()
        parts = [schedule.streams[s.tile] for s in segments if s.tile in schedule.streams]
        sizes = [rows * part.features * DTYPE_BYTES[part.dtype] for part in parts if part.queue]
        if len(sizes) > 1:
            longest = max(longest, device.queue_s(sum(sizes)) - device.queue_s(max(sizes)))
    return longest


@dataclass(frozen=True)
class _Sm:
    """Parts of a step on one SM. ``code``: instructions of the kernel's consumers."""

    device: Device
    dtype: str
    split: bool
    code: float

    def product(self, step: StepCounts) -> Counts:
        """Of both warpgroups. Where the tensor cores idle half of the time, the clock does not fall."""
        device = self.device
        tensor = Amount("tensor", step.flops, device.tensor_flops[self.dtype] / device.sms)
        shared = Amount("shared memory", step.shared_bytes, device.shared_bytes_per_clock * device.clock_hz)
        return Counts("product", (tensor, shared), partial(_longest, device.burst if self.split else 1.0))

    def issue(self, step: StepCounts) -> Counts:
        """Of both warpgroups' epilogues, if nothing ever waited: arithmetic and special functions side by side."""
        lanes = Amount("lanes", step.instructions * self._lanes_s)
        return Counts("issue", (lanes, Amount("special functions", step.special * self._special_s)), max, 2)

    def turns_s(self, step: StepCounts) -> float:
        """From a product to its epilogue and to the next one, and barriers between passes."""
        barriers = sum(p.barriers for p in step.passes)
        return (
            self.device.turnaround_s * (step.turns + 1) / 2 if step.flops else 0.0
        ) + barriers * self.device.barrier_cycles / self.device.clock_hz

    def page_wait_s(self, step: StepCounts, layout: Layout, in_flight: int) -> float:
        """The first pages of a product came while the epilogue before it ran; others are asked for as pages come free.

        With two products in flight a page is held until the next one has come.
        """
        if not step.pages or step.turns > 1:  # a loop's pages come while its epilogues run
            return 0.0
        each = self.product(step).seconds / step.pages
        load = self.device.page_s + layout.page_bytes * layout.page_rings / self.device.sm_bytes_per_s
        period = (load + each) / layout.pages if in_flight == 1 else load / (layout.pages - 1)
        return max(0, step.pages - layout.pages) * max(0.0, period - each)

    def fetched(self, apart: float) -> Amount:
        """A step's code that the L2 gives an SM whose cache it does not fit; to both warpgroups, where one is so many
        instructions ``apart`` from the other that it has none of what that one had."""
        times = 0 if self.code <= self.device.code_held else 1 + (apart > self.device.code_held)
        return Amount("code", self.code * INSTRUCTION_BYTES * times, self.device.code_bytes_per_s)

    def pass_s(self, done: EpilogueCounts) -> float:
        """Of one warpgroup alone."""
        doublings = log2(max(1.0, self.code / self.device.code_cache))
        cycles = self.device.issue_cycles * (1 + self.device.cold_code * doublings)
        each = max(self._lanes_s, cycles / self.device.clock_hz)
        return done.instructions * each + done.special * self._special_s

    @property
    def _lanes_s(self) -> float:
        """One instruction of a warpgroup."""
        return WARPGROUP / (self.device.simt_flops / self.device.sms)

    @property
    def _special_s(self) -> float:
        return WARPGROUP / (self.device.sfu_ops_per_s / self.device.sms)


def _longest(faster: float, seconds: Sequence[float]) -> float:
    return max(seconds) / faster


def _ahead(steps: Sequence[StepCounts], products: Sequence[float], layout: Layout) -> float:
    """Share of the products during which one warpgroup can be an epilogue ahead of the other: both take the same pages,
    so one is never further ahead than the ring is long (8 x 256 chain: 586 us with 4 pages, a layer's; 472 with 5)."""
    shares = (
        s * min(1.0, (layout.pages - 1) * step.turns / step.pages) for step, s in zip(steps, products, strict=True) if s
    )
    total = sum(products)
    return sum(shares) / total if total else 1.0

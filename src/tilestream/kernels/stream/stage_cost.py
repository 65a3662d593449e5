"""How long one step of a stage takes on its SM: from its schedule and layout, at the rates of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log2

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Residency, Stage, Transport
from tilestream.ir.sizes import Phase, phases, weight_bytes
from tilestream.kernels.costs import overlapped
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
from tilestream.kernels.stream.input_ring import first_s, takes_of, waits_s
from tilestream.kernels.stream.layout import Layout, lay_out
from tilestream.kernels.stream.model import Schedule

INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class StageCost:
    """Seconds of one step of a stage on one SM, by what takes them; ``step_s`` is the time between steps.

    ``tensor_s``: wgmma of all tiles of the step. ``shared_s``: what shared memory carries for them. ``lane_s``:
    epilogues of one warpgroup, each instruction behind the one before. ``inputs_s``: waits for inputs, as the input
    ring is too short for those to be on their way in time; ``first_s``: those of the first tile beyond that.
    ``weights_s``: streamed weights through the SM's port.
    ``queue_s``: exposed part of the hand-over of the step's input. ``scattered``: bytes of the L2 beyond those of the
    values, for stores of parts of sectors.
    """

    stage: str
    replicas: int
    tiles_per_step: int
    tensor_s: float
    shared_s: float
    lane_s: float
    inputs_s: float
    weights_s: float
    queue_s: float
    step_s: float
    scattered: float = 0.0
    first_s: float = 0.0

    @property
    def limit(self) -> str:
        parts = {
            "tensor": self.tensor_s,
            "shared memory": self.shared_s,
            "epilogue": self.lane_s,
            "inputs": self.inputs_s,
            "weights": self.weights_s,
            "queue": self.queue_s,
        }
        return max(parts, key=lambda k: parts[k])


def stage_cost(stage: Stage, pipeline: Pipeline, device: Device, loading: int | None = None) -> StageCost:
    """One step of ``stage`` on one SM. Whether it fits there is not looked at.

    Args:
        loading: CTAs that share the DRAM's rate; None for all replicas, or a CTA an SM where none have been dealt out.

    A stage of which no kernel can be made (dtypes mixed, too wide) still runs on the reference machine and in the
    simulator: its products and its lanes' work are taken one after the other.
    """
    queue = device.queue_exposed * max(taken_s(stage, pipeline, device), default=0.0)
    weights = 0.0
    if stage.residency is Residency.STREAMED:
        weights = weight_bytes(stage, pipeline) / device.sm_bytes_per_s
    cost = partial(StageCost, stage.name, stage.replicas, stage.tiles_per_step, weights_s=weights, queue_s=queue)
    try:
        schedule = build(stage, pipeline)
    except VerifyError:
        work = phases(stage, pipeline)
        tensor, lanes = (stage.tiles_per_step * sum(part(p, device) for p in work) for part in (tensor_s, lane_s))
        step = max(tensor + lanes, weights) + queue
        return cost(tensor_s=tensor, shared_s=0.0, lane_s=lanes, inputs_s=0.0, step_s=step)
    layout = lay_out(schedule, device.shared_bytes_per_cta)
    sm = _Sm(device, schedule.dtype, stage.placement.dim == 1, code_size(schedule, layout))
    steps = counts(schedule, layout)
    products = [sm.product_s(s) for s in steps]
    epilogue = sum(sm.epilogue_s(s) for s in steps)
    issue = sum(sm.issue_s(s) for s in steps)
    turns = [sm.turns_s(s) for s in steps]
    split = stage.placement.dim == 1
    alone = [product / (1 if split else 2) + turn for product, turn in zip(products, turns, strict=True)]
    if loading is None:
        loading = stage.replicas if stage.replicas > 1 else device.sms
    takes = takes_of(schedule, pipeline, alone, [sm.passes_s(s) for s in steps], device, loading)
    inputs = waits_s(takes, layout.in_slots)
    streamed = stage.residency is Residency.STREAMED
    pages = sum(sm.page_wait_s(s, layout, stage.in_flight) for s in steps) if streamed else 0.0
    waits = inputs + pages + sum(turns)
    together = sum(products) + max(epilogue, issue) + waits
    if split:
        compute = together  # both work on one tile: nothing runs beside the epilogue
    else:
        # One's epilogue runs beside the other's products, as far as the ring of weights lets one run ahead.
        apart = overlapped(sum(products) / 2 + epilogue + waits, sum(products), issue)
        ahead = 1.0 if not streamed else _ahead(steps, products, layout)
        compute = ahead * apart + (1 - ahead) * together
    compute += joining_s(schedule, device)
    fetched = sm.fetch_s(1.0 if split else code_apart(schedule, layout))
    return cost(
        tensor_s=sum(sm.tensor_s(s) for s in steps),
        shared_s=sum(sm.shared_s(s) for s in steps),
        lane_s=epilogue,
        inputs_s=inputs,
        step_s=max(compute, weights, fetched) + queue,
        scattered=scattered_bytes(schedule, pipeline),
        first_s=first_s(takes, layout.in_slots, device),
    )


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
    """Seconds of parts of a step on one SM. ``code``: instructions of the kernel's consumers."""

    device: Device
    dtype: str
    split: bool
    code: float

    def tensor_s(self, step: StepCounts) -> float:
        rate = self.device.tensor_flops[self.dtype] / self.device.sms
        return step.flops / rate

    def shared_s(self, step: StepCounts) -> float:
        return step.shared_bytes / (self.device.shared_bytes_per_clock * self.device.clock_hz)

    def product_s(self, step: StepCounts) -> float:
        """Of both warpgroups. Where the tensor cores idle half of the time, the clock does not fall."""
        return max(self.tensor_s(step), self.shared_s(step)) / (self.device.burst if self.split else 1.0)

    def issue_s(self, step: StepCounts) -> float:
        """Of both warpgroups' epilogues, if nothing ever waited: arithmetic and special functions side by side."""
        return 2 * max(step.instructions * self._lanes_s, step.special * self._special_s)

    def epilogue_s(self, step: StepCounts) -> float:
        """Of one warpgroup alone."""
        return sum(map(self._pass_s, step.passes))

    def turns_s(self, step: StepCounts) -> float:
        """From a product to its epilogue and to the next one, and barriers between passes."""
        barriers = sum(p.barriers for p in step.passes)
        return (
            self.device.turnaround_s * (step.turns + 1) / 2 if step.flops else 0.0
        ) + barriers * self.device.barrier_cycles / self.device.clock_hz

    def passes_s(self, step: StepCounts) -> list[float]:
        """Of one warpgroup's passes."""
        return [self._pass_s(p) for p in step.passes]

    def page_wait_s(self, step: StepCounts, layout: Layout, in_flight: int) -> float:
        """The first pages of a product came while the epilogue before it ran; others are asked for as pages come free.

        With two products in flight a page is held until the next one has come.
        """
        if not step.pages or step.turns > 1:  # a loop's pages come while its epilogues run
            return 0.0
        each = self.product_s(step) / step.pages
        load = self.device.page_s + layout.page_bytes * layout.page_rings / self.device.sm_bytes_per_s
        period = (load + each) / layout.pages if in_flight == 1 else load / (layout.pages - 1)
        return max(0, step.pages - layout.pages) * max(0.0, period - each)

    def fetch_s(self, apart: float) -> float:
        """Until the L2 has given a step's code to an SM whose cache it does not fit; to both warpgroups, where one is
        so many instructions ``apart`` from the other that it has none of what that one had."""
        if self.code <= self.device.code_held:
            return 0.0
        return self.code * INSTRUCTION_BYTES * (1 + (apart > self.device.code_held)) / self.device.code_bytes_per_s

    def _pass_s(self, done: EpilogueCounts) -> float:
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


def _ahead(steps: Sequence[StepCounts], products: Sequence[float], layout: Layout) -> float:
    """Share of the products during which one warpgroup can be an epilogue ahead of the other: both take the same pages,
    so one is never further ahead than the ring is long (8 x 256 chain: 586 us with 4 pages, a layer's; 472 with 5)."""
    shares = (
        s * min(1.0, (layout.pages - 1) * step.turns / step.pages) for step, s in zip(steps, products, strict=True) if s
    )
    total = sum(products)
    return sum(shares) / total if total else 1.0

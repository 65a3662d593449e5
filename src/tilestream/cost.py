"""The roofline of a pipeline on a device: seconds of every stage, of every launch, of the whole.

The model says what limits each launch, not only how long it takes. What it leaves out: cache misses of rings
larger than the L2, clock changes under load, and the tail of the last wave beyond whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.ir import DTYPE_BYTES, Pipeline, Residency, Stage, Transport
from tilestream.traffic import Traffic, dram_of, l2_of, traffic
from tilestream.work import Phase, phases, steps_of, tiles_of, weight_bytes

__all__ = ["LaunchCost", "Prediction", "StageCost", "Traffic", "predict", "product_bound_us", "stage_cost", "traffic"]


@dataclass(frozen=True)
class StageCost:
    """Seconds of one step of a stage on one SM, by what takes them; ``step_s`` is the time between steps.

    ``tensor_s``: wgmma of all tiles of the step. ``lane_s``: epilogues of one warpgroup. ``weights_s``: streamed
    weights at the L2's rate for this many SMs. ``queue_s``: exposed part of the hand-over of the step's input.
    """

    stage: str
    replicas: int
    tiles_per_step: int
    tensor_s: float
    lane_s: float
    weights_s: float
    queue_s: float
    step_s: float

    @property
    def limit(self) -> str:
        parts = {"tensor": self.tensor_s, "epilogue": self.lane_s, "weights": self.weights_s, "queue": self.queue_s}
        return max(parts, key=lambda k: parts[k])


@dataclass(frozen=True)
class LaunchCost:
    """One launch: the longest of ``stages_s`` (slowest stage), ``dram_s``, ``l2_s``; plus ``fill_s`` and the launch."""

    name: str
    stages: tuple[StageCost, ...]
    stages_s: float
    dram_s: float
    l2_s: float
    fill_s: float
    total_s: float
    limit: str


@dataclass(frozen=True)
class Prediction:
    """What ``pipeline`` is predicted to take at ``rows`` rows on ``device``; seconds, and microseconds as ``us``."""

    device: str
    rows: int
    launches: tuple[LaunchCost, ...]

    @property
    def seconds(self) -> float:
        return sum(launch.total_s for launch in self.launches)

    @property
    def us(self) -> float:
        return self.seconds * 1e6


def predict(pipeline: Pipeline, rows: int, device: Device) -> Prediction:
    """Cost of every launch. Strategy ``bulk`` stands for library kernels and is costed as those are measured to be.

    No rows take no time: nothing is launched.
    """
    if rows == 0:
        return Prediction(device.name, 0, ())
    cost = _bulk_launch if pipeline.strategy == "bulk" else _launch
    return Prediction(device.name, rows, tuple(cost(launch, rows, device) for launch in pipeline.launches()))


def product_bound_us(program: Pipeline, rows: int, device: Device) -> float:
    """What no compiler that makes a kernel of every matrix product can beat: microseconds at ``rows`` rows.

    Each product takes its FLOPs at the tensor cores' rate, or its operand and result at the rate of the DRAM (of
    the L2, where they fit), whichever is longer; everything else, launches included, is free. An operand that
    several products share is read once.
    """
    tiles = program.tiles()
    seen: set[str] = set()
    seconds = 0.0
    for op in (op for stage in program.stages for op in stage.ops if op.kind == "linear"):
        weight = program.tensor(op.params[0])
        out, depth = weight.shape
        columns = out + (0 if op.ins[0] in seen else depth)
        seen.add(op.ins[0])
        moved = rows * columns * DTYPE_BYTES[tiles[op.ins[0]].dtype]
        rate = device.dram_bytes_per_s if moved > device.l2_bytes else device.l2_bytes_per_s
        seconds += max(2.0 * rows * out * depth / device.tensor_flops[weight.dtype], moved / rate)
    return seconds * 1e6


def stage_cost(stage: Stage, pipeline: Pipeline, device: Device, sms: int | None = None) -> StageCost:
    """One step of ``stage`` on one SM. ``sms`` is how many SMs share the L2 (default: all stages' replicas)."""
    work = phases(stage, pipeline)
    tensor = [_tensor_s(p, device) for p in work]
    lanes = [_lane_s(p, device) for p in work]
    waits = sum(device.turnaround_s for p in work if p.flops)
    if stage.placement.dim == 0:
        # Two warpgroups share the tensor core and the lanes; one alone issues at half rate.
        alone = sum(tensor) + 2 * sum(lanes) + waits
        compute = max(2 * sum(tensor) / device.stage_efficiency, 2 * sum(lanes), alone)
        tensor_s, lane_s = 2 * sum(tensor), 2 * sum(lanes)
    else:
        # Both work on the same tile: nothing runs beside the epilogue.
        tensor_s, lane_s = sum(tensor), sum(lanes)
        compute = tensor_s + lane_s + waits
    sharing = sms or sum(s.replicas for s in pipeline.stages)
    streamed = weight_bytes(stage, pipeline) if stage.residency is Residency.STREAMED else 0
    weights = streamed * sharing / device.l2_shared_bytes_per_s
    tiles = pipeline.tiles()
    taken = [
        device.queue_s(tiles[q.tile].bytes)
        for q in pipeline.queues
        if stage.name in q.consumers and q.transport is Transport.L2
    ]
    queue = device.queue_exposed * max(taken, default=0.0)
    return StageCost(
        stage.name,
        stage.replicas,
        stage.tiles_per_step,
        tensor_s,
        lane_s,
        weights,
        queue,
        max(compute, weights) + queue,
    )


def _tensor_s(phase: Phase, device: Device) -> float:
    return phase.flops / (device.tensor_flops[phase.dtype] / device.sms)


def _lane_s(phase: Phase, device: Device) -> float:
    """One tile on all lanes of an SM: arithmetic and special functions issue side by side."""
    ops = phase.lane_ops + device.handoff_ops * phase.handed
    return max(ops / (device.simt_flops / device.sms), phase.sfu_ops / (device.sfu_ops_per_s / device.sms))


def _launch(launch: Pipeline, rows: int, device: Device) -> LaunchCost:
    costs = {s.name: stage_cost(s, launch, device) for s in launch.stages}
    busy = {s.name: steps_of(s, rows) * costs[s.name].step_s for s in launch.stages}
    slowest = max(busy, key=lambda n: busy[n])
    stages_s = max(busy[slowest], _ring_bound(launch, costs, rows, device))
    dram_s, l2_s = _memory(launch, rows, device)
    # Of the way of the first tile, what the steps of the bottleneck do not count already. Which stage that is must not
    # depend on the rows: more of them would make it another, and the sum less.
    bottleneck = max(costs.values(), key=lambda c: c.step_s / (c.tiles_per_step * c.replicas))
    fill_s = _fill(launch, costs, device) - bottleneck.step_s
    resident = [weight_bytes(s, launch) for s in launch.stages if s.residency is Residency.RESIDENT]
    sms = sum(s.replicas for s in launch.stages)
    fill_s += max(resident, default=0) * sms / device.l2_shared_bytes_per_s
    parts = {"dram": dram_s, "l2": l2_s, f"{slowest} ({costs[slowest].limit})": stages_s}
    limit = max(parts, key=lambda k: parts[k])
    total = device.launch_s + max(parts.values()) + max(0.0, fill_s)
    return LaunchCost(launch.name, tuple(costs.values()), stages_s, dram_s, l2_s, max(0.0, fill_s), total, limit)


def _bulk_launch(launch: Pipeline, rows: int, device: Device) -> LaunchCost:
    """A library kernel: at these depths (K up to 512) its loads, its tensor work and its stores hardly overlap."""
    costs = tuple(stage_cost(s, launch, device) for s in launch.stages)
    work = [p for s in launch.stages for p in phases(s, launch)]
    dram_s, l2_s = _memory(launch, rows, device)
    tensor_s = tiles_of(rows) * sum(_tensor_s(p, device) for p in work) / device.sms
    lane_s = tiles_of(rows) * sum(_lane_s(p, device) for p in work) / device.sms
    memory_s = max(dram_s, lane_s)
    total = device.launch_s + ((memory_s + tensor_s) / device.bulk_efficiency if tensor_s else memory_s)
    limit = "dram" if dram_s >= max(tensor_s, lane_s) else "tensor" if tensor_s >= lane_s else "epilogue"
    return LaunchCost(launch.name, costs, tensor_s, dram_s, l2_s, 0.0, total, limit)


def _memory(launch: Pipeline, rows: int, device: Device) -> tuple[float, float]:
    read, written = dram_of(launch, rows)
    dram = sum(read.values()) + sum(written.values())
    distinct, shared = l2_of(launch, rows)
    return dram / device.dram_bytes_per_s, (
        dram + distinct
    ) / device.l2_bytes_per_s + shared / device.l2_shared_bytes_per_s


def _ring_bound(launch: Pipeline, costs: dict[str, StageCost], rows: int, device: Device) -> float:
    """A ring slot is written, crosses the L2, and is held for a step: ``depth`` slots bound the rate."""
    tiles = launch.tiles()
    bound = 0.0
    for q in launch.queues:
        held = device.queue_s(tiles[q.tile].bytes) + max(costs[c].step_s for c in q.consumers)
        bound = max(bound, tiles_of(rows) / q.depth * held)
    return bound


def _fill(launch: Pipeline, costs: dict[str, StageCost], device: Device) -> float:
    """Seconds for the first tile to reach the end: the longest path of steps and hand-overs."""
    tiles = launch.tiles()
    arrival = {s.name: 0.0 for s in launch.stages}
    for stage in topological(launch):
        done = arrival[stage.name] + costs[stage.name].step_s
        for q in launch.queues:
            if q.producer == stage.name:
                for c in q.consumers:
                    arrival[c] = max(arrival[c], done + device.queue_s(tiles[q.tile].bytes))
    return max(arrival[s.name] + costs[s.name].step_s for s in launch.stages)


def topological(launch: Pipeline) -> list[Stage]:
    """Stages of one launch, producers before consumers."""
    order: list[Stage] = []
    placed: set[str] = set()
    left = list(launch.stages)
    while left:
        ready = next(s for s in left if all(q.producer in placed for q in launch.queues if s.name in q.consumers))
        order.append(ready)
        placed.add(ready.name)
        left.remove(ready)
    return order

"""The roofline of a pipeline on a device: seconds of every stage, of every launch, of the whole.

The model says what limits each launch, not only how long it takes. What it leaves out: cache misses of rings
larger than the L2, clock changes under load, and the tail of the last wave beyond whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Residency, Stage, TileOp
from tilestream.ir.sizes import at_once, steps_of, tiles_of, weight_bytes
from tilestream.ir.taps import Tap
from tilestream.ir.traffic import Traffic, dram_of, l2_of, traffic
from tilestream.kernels.costs import LaunchCost, StageCost, overlapped
from tilestream.kernels.families import kernel_of
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.simulator.library import Cache, bulk_kernels, seconds

__all__ = ["LaunchCost", "Prediction", "StageCost", "Traffic", "predict", "product_bound_us", "stage_cost", "traffic"]


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
    """Cost of every launch. Strategy ``bulk`` stands for library kernels (``simulator.library``).

    No rows take no time: nothing is launched.
    """
    if rows == 0:
        return Prediction(device.name, 0, ())
    if pipeline.strategy == "bulk":
        return Prediction(device.name, rows, _bulk(pipeline, rows, device))
    launches = cut_at_dram(pipeline)
    return Prediction(
        device.name,
        rows,
        tuple(kernel_of(p).cost(rows, device) or _launch(p, rows, device) for p in launches),
    )


def product_bound_us(program: Pipeline, rows: int, device: Device) -> float:
    """What no compiler that makes a kernel of every matrix product can beat: microseconds at ``rows`` rows.

    Each product takes its FLOPs at the tensor cores' rate, or its operand and result at the rate of the DRAM (of
    the L2, where they fit), whichever is longer; everything else, launches included, is free. An operand that
    several products share is read once, and so is a picture of which it is many taps.
    """
    tiles = program.tiles()
    taken = {op.out.name: op for stage in program.stages for op in stage.ops if op.out is not None}
    seen: set[str] = set()
    seconds = 0.0
    for op in (op for stage in program.stages for op in stage.ops if op.kind == "linear"):
        weight = program.tensor(op.params[0])
        out, depth = weight.shape
        columns = out + (0 if op.ins[0] in seen else _read(op.ins[0], taken, depth))
        seen.add(op.ins[0])
        moved = rows * columns * DTYPE_BYTES[tiles[op.ins[0]].dtype]
        rate = device.dram_bytes_per_s if moved > device.l2_bytes else device.l2_bytes_per_s
        seconds += max(2.0 * rows * out * depth / device.tensor_flops[weight.dtype], moved / rate)
    return seconds * 1e6


def _read(tile: str, made: dict[str, TileOp], depth: int) -> int:
    """Elements a row of ``tile``, an operand of ``depth`` columns, that are read: of taps, one pixel."""
    op = made[tile]
    loads = [made[name] for name in op.ins] if op.kind == "cat" else [op]
    taps = {load.params[0]: load.out.features for load in loads if load.out is not None and Tap.of(load) is not None}
    return sum(taps.values()) if len(taps) and all(Tap.of(load) for load in loads) else depth


def _launch(launch: Pipeline, rows: int, device: Device) -> LaunchCost:
    costs = {s.name: stage_cost(s, launch, device, at_once(s, rows)) for s in launch.stages}
    busy = {s.name: steps_of(s, rows) * costs[s.name].step_s for s in launch.stages}
    slowest = max(busy, key=lambda n: busy[n])
    stages_s = max(busy[slowest], _ring_bound(launch, costs, rows, device))
    scattered = sum(steps_of(s, rows) * s.replicas * costs[s.name].scattered for s in launch.stages)
    dram_s, l2_s = _memory(launch, rows, device, scattered)
    # Of the way of the first tile, what the steps of the bottleneck do not count already. Which stage that is must not
    # depend on the rows: more of them would make it another, and the sum less.
    bottleneck = max(costs.values(), key=lambda c: c.step_s / (c.tiles_per_step * c.replicas))
    fill_s = max(0.0, _fill(launch, costs, device) - bottleneck.step_s) + _first_tile_s(launch, costs, device)
    parts = {"dram": dram_s, "l2": l2_s, f"{slowest} ({costs[slowest].limit})": stages_s}
    limit = max(parts, key=lambda k: parts[k])
    total = device.launch_s + device.ramp_s + overlapped(*parts.values()) + fill_s
    return LaunchCost(launch.name, tuple(costs.values()), stages_s, dram_s, l2_s, fill_s, total, limit)


def _first_tile_s(launch: Pipeline, costs: Mapping[str, StageCost], device: Device) -> float:
    """Seconds before the first product beside those of later ones: resident weights, inputs that come slowly."""
    resident = [weight_bytes(s, launch) for s in launch.stages if s.residency is Residency.RESIDENT]
    return max(resident, default=0) / device.sm_bytes_per_s + max(cost.first_s for cost in costs.values())


def _bulk(pipeline: Pipeline, rows: int, device: Device) -> tuple[LaunchCost, ...]:
    """Library kernels, which our stages say nothing of: the closed form of what the simulator runs."""
    cache, made = Cache(device), []
    for launch in cut_at_dram(pipeline):
        total = seconds(bulk_kernels(launch, rows), device, cache)
        dram_s, l2_s = _memory(launch, rows, device)
        limit = "dram" if dram_s > total / 2 else "kernels"
        made.append(LaunchCost(launch.name, (), total, dram_s, l2_s, 0.0, total, limit))
    return tuple(made)


def _memory(launch: Pipeline, rows: int, device: Device, scattered: float = 0.0) -> tuple[float, float]:
    """Seconds of DRAM, and of the L2: what queues share, and all that passes the SMs' ports, weights included.

    ``scattered``: bytes of the L2 alone.
    """
    read, written = dram_of(launch, rows)
    dram = sum(read.values()) + sum(written.values())
    distinct, shared = l2_of(launch, rows)
    ports = device.sms * device.sm_bytes_per_s
    l2_s = max((dram + distinct + scattered) / device.l2_bytes_per_s, (dram + distinct + shared) / ports)
    return dram / device.dram_bytes_per_s, l2_s


def _ring_bound(launch: Pipeline, costs: dict[str, StageCost], rows: int, device: Device) -> float:
    """A ring slot is written, crosses the L2, and is held for a step: ``depth`` slots bound the rate."""
    tiles = launch.tiles()
    bound = 0.0
    for q in launch.queues:
        held = device.queue_s(launch.tile_rows * tiles[q.tile].row_bytes) + max(costs[c].step_s for c in q.consumers)
        bound = max(bound, tiles_of(rows, launch) / q.depth * held)
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
                    arrival[c] = max(arrival[c], done + device.queue_s(launch.tile_rows * tiles[q.tile].row_bytes))
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

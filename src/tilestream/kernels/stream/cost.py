"""What a launch of row streams asks for: its stages' steps, the memories, and the way of the first tile.

What it leaves out: cache misses of rings larger than the L2, clock changes under load, and the tail of the last wave
beyond whole steps.
"""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.ir.sizes import at_once, steps_of, tiles_of, weight_bytes
from tilestream.ir.traffic import dram_of, l2_of
from tilestream.ir.ways import producers_first
from tilestream.kernels.costs import Amount, Counts, beside
from tilestream.kernels.stream.stage_cost import StageCost, stage_cost


def cost(launch: Pipeline, rows: int, device: Device) -> Counts:
    """One launch: the slowest stage beside the memories, behind the way of the first tile."""
    costs = {s.name: stage_cost(s, launch, device, at_once(s, rows)) for s in launch.stages}
    slowest = max(launch.stages, key=lambda s: steps_of(s, rows) * costs[s.name].step_s)
    steps = Counts("steps", (costs[slowest.name].step,), times=steps_of(slowest, rows))
    ring = Amount("ring", _ring_bound(launch, costs, rows, device))
    stages = Counts(slowest.name, (steps, ring), max, told=f"{slowest.name} ({{}})")
    scattered = sum(steps_of(s, rows) * s.replicas * costs[s.name].scattered for s in launch.stages)
    memory = _memory(launch, rows, device, scattered)
    # Of the way of the first tile, what the steps of the bottleneck do not count already. Which stage that is must not
    # depend on the rows: more of them would make it another, and the sum less.
    bottleneck = max(launch.stages, key=lambda s: costs[s.name].step_s / (s.tiles_per_step * s.replicas))
    beyond = _fill(launch, costs, device) - costs[bottleneck.name].step_s
    # Before the first product, beside those of later ones: resident weights, inputs that come slowly.
    resident = max((weight_bytes(s, launch) for s in launch.stages if s.residency is Residency.RESIDENT), default=0)
    first_s = resident / device.sm_bytes_per_s + max(cost.first_s for cost in costs.values())
    fill_s = max(0.0, beyond) + first_s
    return Counts(
        launch.name,
        (
            Amount("launch", device.launch_s + device.ramp_s),
            Counts("streams", (*memory, stages), beside),
            Amount("fill", fill_s),
        ),
    )


def _memory(launch: Pipeline, rows: int, device: Device, scattered: float) -> tuple[Amount, Counts]:
    """Bytes of DRAM, and of the L2: what queues share, or all that passes the SMs' ports, weights included.

    ``scattered``: bytes of the L2 alone.
    """
    read, written = dram_of(launch, rows)
    dram = sum(read.values()) + sum(written.values())
    distinct, shared = l2_of(launch, rows)
    ports = device.sms * device.sm_bytes_per_s
    l2 = (
        Amount("l2", dram + distinct + scattered, device.l2_bytes_per_s),
        Amount("sm ports", dram + distinct + shared, ports),
    )
    return Amount("dram", dram, device.dram_bytes_per_s), Counts("l2", l2, max)


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
    for stage in producers_first(launch):
        done = arrival[stage.name] + costs[stage.name].step_s
        for q in launch.queues:
            if q.producer == stage.name:
                for c in q.consumers:
                    arrival[c] = max(arrival[c], done + device.queue_s(launch.tile_rows * tiles[q.tile].row_bytes))
    return max(arrival[s.name] + costs[s.name].step_s for s in launch.stages)

"""A pipeline in ops of rows as launches of a workload: its stages' steps, on the simulator's memories and queues.

A replica is one CTA alone on its SM, and its tile is a step: one tile for each of two warpgroups, which share the
pipes side by side, or one tile for both. How long a step takes with everything at hand is the cost model's
(``stage_cost``). What of it neither pipe explains (epilogues that nothing covers, waits for chunks and pages) is the
CTA's own, beside its loads.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.errors import PipelineDeadlock
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.lengths import EDGES_A_NODE
from tilestream.ir.pipeline import Pipeline, Queue, Residency, Stage, Transport
from tilestream.ir.sizes import at_once, bytes_of, in_places, loaded_bytes, phases, table_bytes, tiles_of, weight_bytes
from tilestream.kernels.costs import beside
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.simulator.library import Cache, bulk_kernels, launches
from tilestream.simulator.tables import compute_s
from tilestream.simulator.workload import Engine, SimLaunch, SimQueue, SimStage, TileWork

WARPGROUPS = 2
"""Of a CTA: each hands its own tile on."""


def launches_of(pipeline: Pipeline, rows: int, device: Device) -> list[list[SimLaunch]]:
    """The kernels of each launch: one of ours, or those of libraries that a launch of strategy ``bulk`` stands for.

    Raises:
        PipelineDeadlock: a queue holds less than a step of its stages.
    """
    parts = cut_at_dram(pipeline)
    if pipeline.strategy != "bulk":
        return [[launch_of(p, rows, device)] for p in parts]
    cache = Cache(device)
    return [launches(bulk_kernels(p, rows), device, cache) for p in parts]


def launch_of(launch: Pipeline, rows: int, device: Device) -> SimLaunch:
    """One launch of a pipeline."""
    by_name = {s.name: s for s in launch.stages}
    loaded: set[str] = set()
    stages = tuple(_stage(stage, launch, rows, device, loaded) for stage in launch.stages)
    queues = tuple(_queue(q, by_name, launch) for q in launch.queues if q.transport is Transport.L2)
    return SimLaunch(launch.name, stages, queues)


def _stage(stage: Stage, launch: Pipeline, rows: int, device: Device, loaded: set[str]) -> SimStage:
    per_step = stage.tiles_per_step
    weights = weight_bytes(stage, launch)
    streamed = stage.residency is Residency.STREAMED
    work = _work(stage, launch, rows, loaded)
    work = replace(work.scaled(per_step), l2_shared_read=weights if streamed else 0)
    sharing = sum(at_once(s, rows) for s in launch.stages)
    cost = stage_cost(stage, launch, device, at_once(stage, rows))
    work = replace(work, l2_write=work.l2_write + cost.scattered)
    compute = cost.step_s - cost.step["queue"].seconds  # queues are simulated
    memory = sharing * (work.dram_read + work.dram_write) / device.dram_bytes_per_s
    late = beside((compute, memory)) - max(compute, memory)
    work = replace(work, own_s=max(0.0, compute - max(compute_s(work, device))) + late)
    steps = ceil(tiles_of(rows, stage) / per_step)
    ctas = max(1, min(stage.replicas, steps))
    return SimStage(
        stage.name,
        Engine.TENSOR if work.tensor_flops else Engine.SIMT,
        steps,
        ctas,
        work,
        once=TileWork(dram_read=weights / ctas, l2_shared_read=0 if streamed else weights, latency_s=cost.first_s),
        registers=device.registers_per_sm,
        ops=tuple(op.kind for op in stage.ops),
        overlap=True,
    )


def _work(stage: Stage, launch: Pipeline, rows: int, loaded: set[str]) -> TileWork:
    """One tile. A tensor that several stages load comes from DRAM for the first of them."""
    done = phases(stage, launch)
    read, written, from_dram = 0, 0, 0.0
    for op in stage.ops:
        if op.kind == "load":
            read += loaded_bytes(op, launch, stage.tile_rows)
            sizes = {name: float(bytes_of(launch.tensor(name), stage.tile_rows)) for name in op.params}
            if in_places(op):  # an equal part of the table for each tile
                sizes[op.params[0]] = table_bytes(op, launch, rows) / tiles_of(rows, stage)
            from_dram += sum(size for name, size in sizes.items() if name not in loaded)
            loaded.update(op.params)
        elif op.kind == "store":
            written += bytes_of(launch.tensor(op.params[0]), stage.tile_rows) // (EDGES_A_NODE if op.receivers else 1)
    return TileWork(
        tensor_flops=sum(p.flops for p in done),
        dtype=next((p.dtype for p in done if p.flops), "bf16"),
        simt_ops=sum(p.lane_ops for p in done),
        sfu_ops=sum(p.sfu_ops for p in done),
        l2_read=read,
        l2_write=written,
        dram_read=from_dram,
        dram_write=written,
    )


def _queue(q: Queue, stages: dict[str, Stage], launch: Pipeline) -> SimQueue:
    per_step = stages[q.producer].tiles_per_step
    largest = max(stages[name].tiles_per_step for name in (q.producer, *q.consumers))
    if q.depth < largest:
        raise PipelineDeadlock(
            f"stages with steps of {largest} tiles wait for room for tile {q.depth} in the queue of {q.tile!r}, "
            f"which holds {q.depth}",
            "check the pipeline with verify(): its queues hold too little",
        )
    payload = launch.tile_rows * launch.tiles()[q.tile].row_bytes * per_step
    # A step of two tiles is worth two steps of one, also where the last step is short of a tile.
    ratios = tuple((stages[name].tiles_per_step, per_step) for name in q.consumers)
    room = q.depth // per_step
    return SimQueue(q.producer, q.consumers, payload, room=room, ratios=ratios, parts=per_step, abreast=WARPGROUPS)

"""How a pipeline runs that was cut: placement, residency, products in flight, replicas, room in queues."""

from __future__ import annotations

from dataclasses import replace

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Residency, Stage, Transport
from tilestream.ir.ways import longest
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.layout import lay_out
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.plan.balance import Load
from tilestream.plan.balance import balance as solve
from tilestream.plan.passes.fit import isolated, narrowest, problem
from tilestream.simulator.workload import Engine


def choose_placement(p: Pipeline, device: Device, dims: tuple[int, ...] = (0, 1)) -> Pipeline:
    """The first of ``Shard(dims)`` with which a stage fits its SM; whether the last one does is for ``verify`` to say.

    By rows (0), each warpgroup has a tile of its own and one's epilogue runs beside the other's products. By
    columns (1), a tile is done in half the time and twice as many SMs have work: better for few rows.
    """
    alone = isolated(p)
    return p.with_stages(tuple(s.with_(placement=narrowest(alone[s.name], device, dims)[0]) for s in p.stages))


def choose_residency(p: Pipeline, device: Device, resident: bool = True) -> Pipeline:
    """``RESIDENT`` for every stage whose weights then fit beside its tiles, else ``STREAMED``.

    Resident weights leave less room for inputs on their way: where DRAM is the limit, streaming them from the L2 for
    every tile may be faster (MeshGraphNets' block: 99 against 127 us). ``resident=False`` streams all.
    """
    alone = isolated(p)
    stages = []
    for stage in p.stages:
        has_weights = any(op.kind == "linear" for op in stage.ops)
        fits = resident and has_weights and not problem(alone[stage.name], device, stage.placement, Residency.RESIDENT)
        stages.append(stage.with_(residency=Residency.RESIDENT if fits else Residency.STREAMED))
    return p.with_stages(tuple(stages))


def choose_in_flight(p: Pipeline, in_flight: int = 2) -> Pipeline:
    """``in_flight`` for every stage that streams weights; 1 where its weight ring has two pages.

    Of two pages, two products in flight hold both until the second has arrived: no load would overlap another
    (GraphCast's block: 1335 against 1250 us). With more pages it depends (NeRF: 542 against 522; the 8 x 256 chain:
    381 against 399), so that the planner times both.
    """
    return p.with_stages(tuple(_chosen(stage, p, in_flight) for stage in p.stages))


def _chosen(stage: Stage, p: Pipeline, in_flight: int) -> Stage:
    if stage.residency is not Residency.STREAMED or not any(op.kind == "linear" for op in stage.ops):
        return stage
    try:
        shallow = lay_out(build(stage, p)).pages < 3
    except VerifyError:
        return stage  # the verifier tells why it is not legal, and better
    return replace(stage, in_flight=1 if shallow else in_flight)


def balance(p: Pipeline, device: Device) -> Pipeline:
    """Replicas that maximise the tiles a second of each launch; every SM of the device is used.

    Unlike the paper's, a stage's rate is that of one SM with everything it waits for, and SIMT and tensor work of a
    stage share the SM. Memory bounds the rate whatever the replicas are.

    Raises:
        VerifyError: a launch has more stages than the device has SMs.
    """
    replicas: dict[str, int] = {}
    for launch in cut_at_dram(p):
        replicas |= _solve(launch, device)
    return p.with_stages(tuple(s.with_(replicas=replicas[s.name]) for s in p.stages))


def _solve(launch: Pipeline, device: Device) -> dict[str, int]:
    n = len(launch.stages)
    if n > device.sms:
        raise VerifyError(
            f"launch {launch.name!r} has {n} stages > {device.sms} SMs of {device.name}", "put more layers into a stage"
        )
    each = {s.name: stage_cost(s, launch, device).step_s / s.tiles_per_step for s in launch.stages}
    loads = [Load(name, Engine.TENSOR, tile_s, device.sms) for name, tile_s in each.items()]
    return solve(loads, device.sms).ctas


def set_queue_depth(p: Pipeline, steps: int = 2, depth: int | None = None) -> Pipeline:
    """Room for ``steps`` steps of all replicas at the busier end; more for a queue that skips stages.

    While a tile goes the long way round, its skip queue must hold all that follows it: the steps of every stage on
    the way. ``depth`` sets the tiles of every queue instead. DRAM queues hold every tile and have depth 0.
    """
    queues = []
    for q in p.queues:
        if q.transport is Transport.DRAM:
            queues.append(replace(q, depth=0))
        elif depth is not None:
            queues.append(replace(q, depth=depth))
        else:
            width = max(p.stage(n).tiles_per_step * p.stage(n).replicas for n in (q.producer, *q.consumers))
            tiles = steps * width * max(longest(p, q.producer, c) for c in q.consumers)
            queues.append(replace(q, depth=tiles + tiles % 2))
    return p.with_stages(p.stages, tuple(queues))

"""How many SMs each stage gets: Kitsune's integer program (section 3.3, algorithm 2), all stages being of one class."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.plan.balance import Load
from tilestream.plan.balance import balance as solve
from tilestream.simulator.workload import Engine


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

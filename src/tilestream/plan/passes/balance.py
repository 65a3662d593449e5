"""How many SMs each stage gets: Kitsune's integer program (section 3.3, algorithm 2)."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.traffic import dram_of, l2_of
from tilestream.plan.cost import stage_cost

TIE_BREAK = 1e-3


def balance(p: Pipeline, device: Device) -> Pipeline:
    """Replicas that maximise the tiles a second of each launch; every SM of the device is used.

    Maximise ``T`` subject to ``T <= rate_i * replicas_i`` for every stage, ``sum replicas_i = SMs``,
    ``T * bytes a tile <= bandwidth`` for L2 and DRAM, whole replicas, at least one a stage, one CTA an SM.
    Unlike the paper's, a stage's rate is that of one SM with everything it waits for, and SIMT and tensor
    work of a stage share the SM.

    Raises:
        VerifyError: a launch has more stages than the device has SMs.
    """
    replicas: dict[str, int] = {}
    for launch in cut_at_dram(p):
        replicas |= _solve(launch, device)
    return p.with_stages(tuple(s.with_(replicas=replicas[s.name]) for s in p.stages))


def _solve(launch: Pipeline, device: Device) -> dict[str, int]:
    names = [s.name for s in launch.stages]
    n = len(names)
    if n > device.sms:
        raise VerifyError(
            f"launch {launch.name!r} has {n} stages > {device.sms} SMs of {device.name}", "put more layers into a stage"
        )
    if n == 1:
        return {names[0]: device.sms}
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second that a cached plan need not spend

    costs = [stage_cost(s, launch, device) for s in launch.stages]
    rates = np.array([c.tiles_per_step / c.step_s for c in costs])
    scale = rates.max()
    # Unknowns: replicas of each stage, the slowest stage's rate, and T. Where memory is the limit, T alone would
    # leave the replicas open: the slowest stage's rate then decides among the solutions.
    stage_rates = np.hstack([-np.diag(rates / scale), np.ones((n, 1)), np.zeros((n, 1))])
    constraints = [
        LinearConstraint(stage_rates, -np.inf, 0.0),
        LinearConstraint(np.array([[0.0] * n + [-1.0, 1.0]]), -np.inf, 0.0),
        LinearConstraint(np.array([[1.0] * n + [0.0, 0.0]]), device.sms, device.sms),
    ]
    least = np.array([1.0] * n + [0.0, 0.0])
    most = np.array([float(device.sms)] * n + [np.inf, memory_bound(launch, device) / scale])
    solved = milp(
        np.array([0.0] * n + [-TIE_BREAK, -1.0]),
        constraints=constraints,
        integrality=np.array([1] * n + [0, 0]),
        bounds=Bounds(least, most),  # pyright: ignore[reportArgumentType]  (arrays, whatever the stub says)
    )
    if solved.x is None:
        raise VerifyError(
            f"no balance of launch {launch.name!r} was found: {solved.message}", "put more layers into a stage"
        )
    return dict(zip(names, (int(round(x)) for x in solved.x[:n]), strict=True))


def memory_bound(launch: Pipeline, device: Device) -> float:
    """Tiles a second that DRAM and L2 can carry for ``launch``."""
    many = 1024  # tiles: enough that parameters, read once, do not count
    read, written = dram_of(launch, many * launch.tile_rows)
    parameters = dram_of(launch, 0)[0]
    dram = (sum(read.values()) + sum(written.values()) - sum(parameters.values())) / many
    rings, _ = l2_of(launch, many * launch.tile_rows)
    l2 = dram + rings / many
    return min(device.dram_bytes_per_s / max(dram, 1.0), device.l2_bytes_per_s / max(l2, 1.0))

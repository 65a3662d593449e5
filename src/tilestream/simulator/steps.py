"""How long a step of a stage's CTA takes on its SM, by what it does: fitted to kernels of ours on an H200.

The cost model counts arithmetic; real steps also pay for what its operators become: reductions across lanes,
concatenations through shared memory, loads that come too late. The constants here are issue slots and shares, fitted on
the kernels that docs/truth.md lists as fitted, none on those that it reports as held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Stage
from tilestream.ir.sizes import padded_flops, phases, width
from tilestream.ir.tileops import OPS

LEAST_COLUMNS = 64


@dataclass(frozen=True)
class StepCosts:
    """Issue slots an element (of all lanes of an SM), and shares. Few, since few kernels are there to fit them on.

    ``slots``: factor on counted instructions, and on what leaves registers: stalls and addresses. ``norm``: slots an
    element of LayerNorm, RMSNorm or softmax. ``cat``: slots an element of a concatenation of computed tiles. ``late``:
    share of a step's DRAM time that its loads do not hide, of at most as much as its work.
    """

    slots: float = 1.19
    norm: float = 14.8
    cat: float = 38.8
    late: float = 0.78


H200_STEPS = StepCosts()


@dataclass(frozen=True)
class Step:
    """One tile: seconds on the tensor pipe and on all lanes of an SM."""

    tensor_s: float
    lane_s: float


def tile_of(stage: Stage, launch: Pipeline, device: Device, costs: StepCosts = H200_STEPS) -> Step:
    """Seconds of one tile of ``stage``, each pipe by itself."""
    rate = {dtype: flops / device.sms for dtype, flops in device.tensor_flops.items()}
    lanes, special = device.simt_flops / device.sms, device.sfu_ops_per_s / device.sms
    tiles = launch.tiles()
    loaded = {op.out.name for op in stage.ops if op.kind == "load" and op.out is not None}
    tensor = slots = sfu = 0.0
    for op in stage.ops:
        if op.kind == "linear":
            weight = launch.tensor(op.params[0])
            own = padded_flops(weight)
            tensor += max(own, _narrow(weight.shape, weight.dtype)) / rate[weight.dtype]
            slots += costs.slots * TILE_ROWS * weight.shape[0] * (len(op.params) == 2)
            continue
        spec, elements = OPS[op.kind], TILE_ROWS * width(op, tiles)
        if spec.family == "norm":
            slots += costs.norm * elements
        elif op.kind == "cat":
            slots += costs.cat * elements * (not set(op.ins) <= loaded)
        else:
            slots += costs.slots * spec.flops * elements
            sfu += spec.transcendental * elements
    slots += costs.slots * device.handoff_ops * sum(p.handed for p in phases(stage, launch))
    return Step(tensor, slots / lanes + sfu / special)


def _narrow(shape: tuple[int, ...], dtype: str) -> float:
    """FLOPs of a linear of ``LEAST_COLUMNS`` columns and the same depth; none where it is as wide."""
    out, inner = shape
    if out >= LEAST_COLUMNS:
        return 0.0
    depth = 128 // DTYPE_BYTES[dtype]
    return 2.0 * TILE_ROWS * LEAST_COLUMNS * depth * ceil(inner / depth)


def compute_s(stage: Stage, launch: Pipeline, device: Device, costs: StepCosts = H200_STEPS) -> float:
    """Seconds of one step with everything at hand: two tiles by two warpgroups that take turns on the tensor core, of
    which one alone issues at half rate; or one tile by both."""
    tile = tile_of(stage, launch, device, costs)
    if stage.placement.dim == 0:
        alone = tile.tensor_s + 2 * tile.lane_s
        return max(2 * tile.tensor_s, 2 * tile.lane_s, alone)
    return tile.tensor_s + tile.lane_s

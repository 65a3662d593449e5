"""What a pipeline is predicted to take on a device, by the counts of its launches' kernels: what candidates are ranked
by, and what no compiler that makes a kernel of every product can beat."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.taps import Tap
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.families import kernel_of
from tilestream.simulator.library import Cache, bulk_kernels, seconds


def predict(pipeline: Pipeline, rows: int, device: Device) -> Counts:
    """A part for every launch, which says what limits it. Strategy ``bulk`` stands for library kernels
    (``simulator.library``), of which our stages say nothing: the closed form of what the simulator runs.

    No rows take no time: nothing is launched.
    """
    launches, cache = cut_at_dram(pipeline) if rows else (), Cache(device)
    if pipeline.strategy == "bulk":
        each = (Amount("kernels", seconds(bulk_kernels(p, rows), device, cache)) for p in launches)
    else:
        each = (kernel_of(p).cost(rows, device) for p in launches)
    return Counts(pipeline.name, tuple(each))


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

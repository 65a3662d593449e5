"""A pipeline of strategy ``bulk`` as the kernels of libraries that it stands for."""

from __future__ import annotations

from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.sizes import bytes_of, tiles_of, width
from tilestream.ir.tileops import OPS
from tilestream.ir.traffic import dram_of
from tilestream.simulator.library.kernels import Gemm, Kernel, Stream
from tilestream.simulator.library.products import Product


def kernels(launch: Pipeline, rows: int) -> list[Kernel]:
    """One launch: a GEMM for each of its linears, and one kernel of Inductor's for all its other ops."""
    ops = [op for stage in launch.stages for op in stage.ops]
    linears = [op for op in ops if op.kind == "linear"]
    others = [op for op in ops if OPS[op.kind].family not in ("memory", "linear")]
    from_dram, to_dram = ({n: float(size) for n, size in part.items()} for part in dram_of(launch, rows))
    loaded = {op.out.name: op.params[0] for op in ops if op.kind == "load" and op.out is not None}
    stored = {op.ins[0]: op.params[0] for op in ops if op.kind == "store"}
    made: list[Kernel] = []
    read, between = dict(from_dram), {}
    for number, op in enumerate(linears):
        kernel = _linear(op, launch, rows, loaded, stored, number)
        made.append(kernel)
        for name, _ in kernel.reads:
            read.pop(name, None)
        (result,) = kernel.writes
        if result[0] not in to_dram:
            between |= (result,)
    if others or not linears:
        made.append(_stream(others, launch, rows, {**read, **between}, to_dram))
    return made


def _linear(
    op: TileOp, launch: Pipeline, rows: int, loaded: dict[str, str], stored: dict[str, str], number: int
) -> Kernel:
    weight = launch.tensor(op.params[0])
    out, inner = weight.shape
    size = DTYPE_BYTES[weight.dtype]
    operand = loaded.get(op.ins[0], f"{launch.name}:{op.ins[0]}")
    result = stored.get(op.made.name, f"{launch.name}:{op.made.name}")
    reads = [(operand, float(rows * inner * size)), *((n, float(bytes_of(launch.tensor(n), 0))) for n in op.params)]
    return Kernel(
        f"{launch.name}.{number}",
        Gemm(Product(1, rows, out, inner, weight.dtype, "nt")),
        tuple(reads),
        ((result, float(rows * out * size)),),
        ("linear",),
        op.source,
    )


def _stream(
    ops: list[TileOp], launch: Pipeline, rows: int, read: dict[str, float], written: dict[str, float]
) -> Kernel:
    tiles = launch.tiles()
    whole = tiles_of(rows, launch) * launch.tile_rows
    work = Stream(
        float(rows * max((width(op, tiles) for op in ops), default=1)),
        simt_ops=float(whole * sum(OPS[op.kind].lanes * width(op, tiles) for op in ops)),
        sfu_ops=float(whole * sum(OPS[op.kind].transcendental * width(op, tiles) for op in ops)),
    )
    return Kernel(
        f"{launch.name}.rest", work, tuple(read.items()), tuple(written.items()), tuple(op.kind for op in ops)
    )

"""Float32 products on tensor cores, by parts of bf16 (``ir.float32``)."""

from __future__ import annotations

from torch import fx

from tilestream.graph.lowering import PARTS, Emitter, Steps
from tilestream.graph.nodes import Unsupported
from tilestream.ir.float32 import LARGEST, MOST_FEATURES, PAIRS
from tilestream.ir.pipeline import Tile

FLOAT32 = "a float32 matmul under torch.set_float32_matmul_precision('highest'): tensor cores have tf32 ('high')"


def product(e: Emitter, x: Tile, weight: fx.Node, steps: Steps, outs: int) -> Tile:
    """``x @ weight.T`` of float32, for a weight of [outs, features of x] behind ``steps``.

    Raises:
        Unsupported: more features than such a sum is right for.
    """
    if x.features > MOST_FEATURES:
        raise Unsupported(f"{FLOAT32}, and parts of bf16 are as exact over {MOST_FEATURES} features at most")
    parts = _parts(e, x)
    operands = tuple(parts[k] for k, _ in PAIRS)
    w = e.parameter(weight, (*steps, *PARTS), (outs, len(PAIRS) * x.features), "bf16")
    joined = e.emit("cat", len(PAIRS) * x.features, "bf16", operands)
    return e.emit("linear", outs, "f32", (joined,), (w,))


def _parts(e: Emitter, x: Tile) -> tuple[Tile, ...]:
    """The three parts of a tile, which products of it share."""
    if x.name not in e.split:
        rest, made = x, []
        for _ in range(2):
            held = e.binary("minimum", e.binary("maximum", rest, -LARGEST, "f32"), LARGEST, "f32")
            made.append(e.unary("cast", held, "bf16"))
            rest = e.binary("sub", rest, made[-1], "f32")
        e.split[x.name] = (*made, e.unary("cast", rest, "bf16"))
    return e.split[x.name]

"""MLPs that end in one column, as programs."""

from __future__ import annotations

from programs import Program

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split

HEAD = Split(4, 1, Tail.CLUSTER, row_tiles=16, depth=64, middle=Middle.NONE)


def head(depth: int = 512, hidden: int = 256) -> Pipeline:
    """512-256-1, as DLRM's top MLP ends."""
    program = Program("head", "bf16")
    program.store(program.linear(program.linear(program.load("x", depth), hidden, "relu"), 1))
    return program.build()


def layers_of(program: Pipeline) -> list[int]:
    return [op.out.features for op in program.stages[0].ops if op.kind == "linear" and op.out is not None]

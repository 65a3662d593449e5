"""The cost of a tile op is what the generated machine code issues."""

from __future__ import annotations

import pytest
import sass
from compiled import compile_source
from programs import Program

from tilestream import cuda
from tilestream.ir.pipeline import TILE_ROWS
from tilestream.ir.tileops import OPS

pytestmark = [
    pytest.mark.nvrtc,
    pytest.mark.xdist_group("op_counts"),  # one process makes what its tests share
    pytest.mark.skipif(
        sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
    ),
]
COLUMNS = 64
EACH = TILE_ROWS * COLUMNS / 128  # elements of one thread of the warpgroup
UNARY = [kind for kind, spec in OPS.items() if spec.family == "unary" and kind != "cast"]
FREE = {"neg", "square"}  # ptxas folds these into the addition behind them


def instructions(kind: str) -> tuple[int, int]:
    """Instructions of the consumers of ``b + kind(a)``, and how many of them are the special function unit's."""
    p = Program(f"count_{kind}", "bf16")
    a, b = p.load("a", COLUMNS), p.load("b", COLUMNS)
    p.store(p.op("add", COLUMNS, b, p.op(kind, COLUMNS, a) if kind else a))
    (source,) = cuda.sources(p.build())
    names = [i.name for i in sass.disassemble(compile_source(source).cubin).consumers()]
    return len(names), names.count("MUFU")


@pytest.fixture(scope="module")
def without() -> tuple[int, int]:
    return instructions("")


@pytest.mark.parametrize("kind", UNARY)
@pytest.mark.every(8)
def test_counts_are_those_of_the_machine_code(kind: str, without: tuple[int, int]):
    every, special = ((found - base) / EACH for found, base in zip(instructions(kind), without, strict=True))
    spec = OPS[kind]
    assert special == pytest.approx(spec.transcendental, abs=0.1)
    assert every == pytest.approx(0 if kind in FREE else spec.flops, abs=max(1.0, 0.1 * spec.flops))

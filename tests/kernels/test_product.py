"""One product, two schedulers: what both compute in front of it and behind it is the same text."""

from __future__ import annotations

import re

import pytest
from shared_tiles import Ffn

from tilestream import devices
from tilestream.kernels.families import kernel_of
from tilestream.kernels.parts.source import KernelSource
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.passes.tile_block import tile_block

BLOCKS = [
    Ffn(1024, 256, 256, gated=True, act="silu", bias=True, residual=True, norm="rms"),
    Ffn(1024, 256, 256, act="gelu", residual=True, norm="layer", dtype="f16"),
]
READ = ("Io<f32>::load", "Pair<", "v[")
"""How a statement begins that reads a vector: from shared memory, or from words in registers."""


def both(block: Ffn) -> tuple[KernelSource, KernelSource]:
    program = block.program()
    few, many = share_tile(program, Split(4, 8)), tile_block(program, devices.get("h200"))
    return kernel_of(few).source(), kernel_of(many).source()


def body(text: str, name: str) -> list[str]:
    """The statements of one of the kernel's functions."""
    inner = re.search(rf"static TS_DEV void {name}\(.*?\) {{\n(.*?)\n  }}", text, re.DOTALL)
    assert inner is not None
    return [line.strip() for line in inner[1].splitlines()]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_norm_in_front_has_one_form(block: Ffn) -> None:
    few, many = (body(source.text, "before") for source in both(block))
    assert few[0].startswith("using R = Row<256, ") and many[0] == "using R = Row<256, WARP>;"

    def computed(lines: list[str]) -> list[str]:
        return [re.sub(r"scratch \+ \d+", "scratch", line) for line in lines[1:] if not line.endswith(".again();")]

    assert computed(few) == computed(many)
    assert len(computed(many)) < len(many) - 1  # a warp with few registers computes again what it needs


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["middle", "after"])
def test_epilogues_are_emitted_in_one_place(block: Ffn, name: str) -> None:
    few, many = ([line for line in body(s.text, name) if not line.startswith(READ)] for s in both(block))
    assert few == many


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_one_argument_of_what_both_have(block: Ffn) -> None:
    few, many = ({f.name: f.declaration for f in source.params.fields} for source in both(block))
    common = few.keys() & many.keys()
    assert {"input", "firsts", "lasts", "vectors", "rows_of", "operand_data", "flags", "rows"} <= common
    assert [name for name in common if few[name] != many[name]] == ["results"]  # pointers, and maps

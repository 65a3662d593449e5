"""Products over many chunks are loops: less to compile, and no addresses that are kept from one to the next."""

from __future__ import annotations

import re

import pytest
from programs import Program, chain

from tilestream.cuda.compile import compile_split
from tilestream.ir.pipeline import Pipeline, Shard
from tilestream.kernels.stream.emit import emit


def by_columns(program: Pipeline, in_flight: int = 2) -> Pipeline:
    return program.with_stages((program.stages[0].with_(placement=Shard(1), in_flight=in_flight),))


def edges_in_training(width: int = 512) -> Pipeline:
    """GraphCast's: an encoder and a message's layers in one stage, with what their backward graph wants stored."""
    p = Program("edges")
    h = p.load("x", 4)
    for beside in ((), (p.load("a", width), p.load("b", width))):
        h = p.linear(p.cat(h, *beside) if beside else h, width)
        p.store(h)
        h = p.linear(p.op("silu", width, h), width)
        p.store(h)
        h = p.layer_norm(h)
    p.store(h)
    return p.build()


HELD = [("unroll 2", 7, "product_shared")]


def loops(text: str) -> list[tuple[str, int, str]]:
    """(pragma, chunks, what comes first in it) of every loop over chunks of a product."""
    found = re.findall(r"#pragma (unroll.*)\n\s*for \(int c = 0; c < (\d+); \+\+c\) \{\n\s*(\w+)", text)
    return [(pragma, int(count), first) for pragma, count, first in found if first in ("product_shared", "const")]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        # Streams come first, here of 16 chunks with two pages of weights each for a warpgroup. The first chunk that
        # waits in shared memory is by itself: what is in flight before it, if anything is, was a stream's.
        (edges_in_training(), [*HELD, ("unroll 2", 16, "const"), *HELD, *HELD]),
        (chain(2, 512), [("unroll", 8, "const"), *HELD]),
        (chain(2, 256), [("unroll", 4, "const")]),
    ],
)
def test_many_chunks_are_a_loop(program: Pipeline, expected: list[tuple[str, int, str]]) -> None:
    assert loops(emit(by_columns(program)).text) == expected


def test_one_loop_where_no_product_is_in_flight_before() -> None:
    """With one product in flight every page is given back as soon as it was used: all chunks are alike."""
    text = emit(by_columns(chain(2, 512), in_flight=1)).text
    assert ("unroll 2", 8, "product_shared") in loops(text)
    assert text.count("+ (u32)(c) * CHUNK_BYTES") == 1 and "+ 1 * CHUNK_BYTES" not in text


@pytest.mark.nvrtc
def test_addresses_of_operands_are_not_spilled() -> None:
    """Unrolled, its products kept the addresses of 32 chunks of operands for each other: 716 bytes, and three times as
    long in NVRTC."""
    report = compile_split(emit(by_columns(edges_in_training())), 0)
    assert report.spills <= 200, report.log
    assert "C75" not in report.log

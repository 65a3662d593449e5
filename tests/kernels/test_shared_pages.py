"""Narrow layers between wide ones: their chunks of weights share pages of the ring."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from host_runs import check, with_stage
from programs import Program, nerf

from tilestream.ir.pipeline import Pipeline, Residency, Shard
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.emit import emit
from tilestream.kernels.stream.layout import boxes_of, lay_out, pages_of

PRODUCT = re.compile(r"product_registers<Mma<T, (\d+), 0>, (\d+), (\d+)>")


def pages(pipeline: Pipeline) -> list[int]:
    """Pages of each product of the only stage."""
    schedule = build(pipeline.stages[0], pipeline)
    rows = lay_out(schedule).page_rows
    return [pages_of(schedule, step, step.gemm, rows) for step in schedule.steps if step.gemm]


def one_stage(program: Pipeline, **changes: object) -> Pipeline:
    """The program on every SM, weights streamed."""
    return with_stage(program, **{"replicas": 132, "residency": Residency.STREAMED, **changes})


def mlp(*widths: int) -> Pipeline:
    first, *others, last = widths
    program = Program("mlp", "bf16")
    h = program.load("x", first)
    for width in others:
        h = program.linear(h, width, "relu")
    program.store(program.linear(h, last))
    return program.build()


def test_narrow_layers_take_as_few_pages_as_they_fill() -> None:
    # Points 1, four layers of 4, the skip 1 + 4, two of 4; density 1 (not 4), features 4, views 1 + 2 (not 4), colour.
    assert pages(one_stage(nerf())) == [1, 4, 4, 4, 4, 5, 4, 4, 1, 4, 3, 1]
    text = emit(one_stage(nerf())).text
    assert {("1", "16", "1024"), ("16", "8", "16384"), ("1", "8", "1024")} == set(PRODUCT.findall(text))


@pytest.mark.parametrize(
    ("changes", "narrow"),
    [
        ({}, 1),
        ({"group": 2}, 4),  # each CTA of a pair brings half a page's rows
        ({"placement": Shard(1)}, 4),  # each warpgroup has a ring of its own
        ({"residency": Residency.RESIDENT}, 4),
    ],
)
def test_which_rings_have_shared_pages(changes: dict[str, object], narrow: int) -> None:
    assert pages(one_stage(mlp(64, 256, 8), **changes))[-1] == narrow


def test_what_comes_through_the_input_ring_has_a_page_a_chunk() -> None:
    pipeline = one_stage(mlp(192, 32, 256, 256))
    schedule = build(pipeline.stages[0], pipeline)
    first, second, _ = (step for step in schedule.steps if step.gemm)
    assert first.gemm is not None and second.gemm is not None
    assert boxes_of(schedule, first, first.gemm.segments[0], 256) == 1
    assert pages(pipeline)[:2] == [3, 1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("in_flight", [1, 2])
def test_kernels_read_shared_pages(in_flight: int, tmp_path: Path) -> None:
    """Layers of one column, of a part of a page, of a depth that is no multiple of a page's chunks."""
    pipeline = one_stage(mlp(40, 200, 100, 129, 1, 256, 3), in_flight=in_flight)
    assert len(PRODUCT.findall(emit(pipeline).text)) >= 3
    check(pipeline, 200, tmp_path)

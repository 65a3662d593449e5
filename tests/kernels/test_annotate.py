"""Comments of ``explain --kernel``: every step with its operations and the user's line, and the same code."""

from __future__ import annotations

import re

import pytest
from golden_cuda import NAMED
from programs import chain, nerf
from samples import spatial, vertical
from shared_tiles import Ffn
from stationary import Layer
from stationary import gradients as sums

from tilestream import devices
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import kernel_of
from tilestream.kernels.stream.emit import emit
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.passes.tile_block import tile_block

COMMENT = re.compile(r"^    // \w+, step \d+: .*\n", re.MULTILINE)


@pytest.mark.parametrize("make", [vertical, spatial, lambda: chain(4), nerf])
def test_the_code_is_the_same_but_for_the_comments(make):
    for launch in cut_at_dram(make()):
        plain, annotated = emit(launch).text, emit(launch, annotate=True).text
        assert COMMENT.search(plain) is None
        assert annotated != plain and COMMENT.sub("", annotated) == plain


def test_every_step_names_its_operations_and_line():
    notes = COMMENT.findall(emit(vertical(), annotate=True).text)
    assert len(notes) == 4  # four layers, though three of them are one loop
    assert notes[0].strip() == "// all, step 0: linear 64>64 + relu; model.py:10 in forward: h = relu(layer0(h))"
    assert "+ add + store y" in notes[-1]


def test_a_line_that_ends_in_a_backslash_hides_no_code():
    from dataclasses import replace

    p: Pipeline = vertical(1)
    (stage,) = p.stages
    ops = tuple(replace(op, source="model.py:3 in forward: h = a + \\") for op in stage.ops)
    text = emit(replace(p, stages=(replace(stage, ops=ops),)), annotate=True).text
    assert all(not line.rstrip().endswith("\\") for line in COMMENT.findall(text))


@pytest.mark.parametrize("name", NAMED)
def test_the_text_says_nothing_that_means_nothing(name: str):
    """No loop of one trip, no condition on a constant, no sum with zero; masks only where columns pad a block."""
    for launch in cut_at_dram(NAMED[name]()):
        for body in re.findall(r"^TS_DEV void consume\(.*?^}", emit(launch).text, re.MULTILINE | re.DOTALL):
            assert not re.search(r"< 1; \+\+|constexpr bool|= (true|false);|\|\| true|\b1 \* l|\+ 0[ ,)]", body)
            assert bool(re.search(r"\bok[01]\b", body)) == ("const bool ok0" in body)
            # Directives stand with what they are about; the loop over units has the first.
            assert [line for line in body.splitlines() if line.startswith("#")] == ["#pragma unroll 1"]


def test_tables_and_workers_name_their_columns():
    text = emit(chain(4)).text
    assert "PAGE_OPS[] = {  // map, x, y, bytes, ring, half" in text and "/*stage*/ 0, /*step*/ 2" in text
    assert all(len(line) <= 122 for line in text.split("struct Params")[0].splitlines() if line.startswith("    {"))
    for word in ("TS_LANES", "TS_PASS", "TS_REG"):
        assert re.search(rf"^//.*{word}", text, re.MULTILINE), f"{word} is not explained"


def shared() -> Pipeline:
    return share_tile(Ffn(512, 128, 192).program(), Split(4, 8))


def gradients() -> Pipeline:
    return sums(Layer(128, 128, splits=4, groups="o"))


def tiled() -> Pipeline:
    return tile_block(Ffn(512, 256, 256).program(), devices.get("h200"))


@pytest.mark.parametrize("make", [vertical, shared, tiled, gradients])
def test_kernels_of_every_family_say_which_operation_is_which_line(make):
    kernel = kernel_of(make())
    plain, told = kernel.source().text, kernel.source(annotate=True).text
    assert COMMENT.sub("", told).endswith(plain) and "\n// Generated" in told
    heads = told.split("// Generated")[0].splitlines()
    for stage in kernel.launch.stages:
        for op in stage.ops:
            assert any(head.startswith(f"// {stage.name}: {op.kind}") and head.endswith(op.source) for head in heads)

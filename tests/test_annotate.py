"""Comments of ``explain --kernel``: every step with its operations and the user's line, and the same code."""

from __future__ import annotations

import re

import pytest
from programs import chain, nerf
from samples import spatial, vertical

from tilestream.cuda import emit
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline

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

"""The pass that makes one sum of a softmax's maximum, exponentials, sum and division."""

from __future__ import annotations

import pytest
import torch
from ragged_cases import CASES, GAT_NAMES, GAT_TENSORS, LENGTHS, PASSES, SCORES, ragged

from tilestream.ir.text import show_op
from tilestream.ir.verify import verify
from tilestream.plan.passes.weigh_by_softmax import weigh_by_softmax
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64

EXPONENTIALS = f"""{SCORES}
    hi[nodes,h]:f32 = product s combine=max
    d[edges,h]:f32 = sub s hi
    e[edges,h]:f32 = exp d
    z[nodes,h]:f32 = product e
"""
AS_PYG = f"""{EXPONENTIALS}
    g[nodes,h]:f32 = add z scalar=1e-16
    a[edges,h]:f32 = div e g
    w[edges,h,c]:f32 = mul m a
    y[nodes,h,c]:f32 = product w
    y -> Y[nodes,h,c]
"""
BEHIND = f"""{EXPONENTIALS}
    t[nodes,h,c]:f32 = product e m
    g[nodes,h]:f32 = maximum z scalar=1e-9
    y[nodes,h,c]:f32 = div t g
    y -> Y[nodes,h,c]
"""


@pytest.mark.parametrize("text", [PASSES, AS_PYG, BEHIND], ids=["passes", "as PyG", "divided behind"])
def test_a_softmax_becomes_one_sum(text: str) -> None:
    before = ragged(text, GAT_TENSORS, GAT_NAMES)
    after = weigh_by_softmax(before)
    verify(after)
    assert [show_op(op) for op in after.stages[0].ops][-2:] == [
        "y[nodes,h,c]:f32 = product s[edges,h] m[edges,h,c] combine=softmax",
        "y[nodes,h,c] -> Y[nodes,h,c]",
    ]
    assert {"hi", "e", "z"}.isdisjoint(after.tiles())
    given = CASES["GAT in passes"].given(LENGTHS)
    old, new = (run_meshes(p, given, FLOAT64)["Y"] for p in (before, after))
    torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y -> Y", "a -> A[edges,h]\n y -> Y"),  # the weights are an output too
        ("a[edges,h]:f32", "a[edges,h]:bf16"),  # rounded to bf16 as operands of the sum
        ("product s combine=max", "product u combine=max"),  # the maximum of something else
        ("div e z", "div z e"),
        ("scalar=1e-16", "scalar=1e-3"),
        ("product e\n", "product e combine=max\n"),
    ],
)
def test_what_is_no_softmax_stays(old: str, new: str) -> None:
    text = AS_PYG if old == "scalar=1e-16" else PASSES
    tensors = GAT_TENSORS + " >A[edges,h]:f32"
    assert old in text
    p = ragged(text.replace(old, new), tensors, GAT_NAMES)
    assert weigh_by_softmax(p) == p


def test_division_behind_the_sum_without_a_guard_stays() -> None:
    """Of no edges it is 0 / 0."""
    p = ragged(BEHIND.replace("div t g", "div t z"), GAT_TENSORS, GAT_NAMES)
    assert weigh_by_softmax(p) == p

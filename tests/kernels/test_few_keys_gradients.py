"""Gradients of attention over few keys: the kernel on the host, a fiber a lane, and compiled; what they mean."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from host_runs import gxx, is_caught
from short_attentions import CASES, Case, given_gradient, judged_gradients
from torch import Tensor

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.short_attention import gradients_call
from tilestream.graph.short_attention import GRADIENTS, short_attention
from tilestream.kernels.operators.few_keys import Attention
from tilestream.kernels.operators.few_keys_gradients import NAME, each, kernel, shapes, takes

TRAINED = {
    "a window of Swin's": replace(CASES["a window of Swin's"], batches=3),
    "shifted windows": CASES["shifted windows"],
    "padding": CASES["padding"],
    "one key": CASES["one key"],
    "one query, f16": CASES["one query, f16"],
    "a bias by query and key, f16": CASES["a bias by query and key, f16"],
    "a bias and padding, not in registers": CASES["a bias and padding, not in registers"],
    "ten queries, 120 keys": Case(2, 1, 10, 64, (), 120),
    "more queries than keys": Case(3, 1, 64, 32, ((1, 1, 64, 20),), 20),
    "a long head": Case(2, 2, 200, 32, (), 49),
    "a long head, masks of two kinds": Case(4, 1, 130, 16, ((2, 1, 1, 20),), 20),
}


def arguments(case: Case, safe: bool = True, sequences: int = 2) -> list[Any]:
    """Of ``GRADIENTS``; what is added to all sequences alike wants a gradient where there is a kernel for it."""
    operands, terms = case.operands(), case.terms()
    a = Attention(case.batches, case.heads, case.queries, operands[1].shape[2], case.features, terms=len(terms))
    summed = bool(terms) and len(terms[0]) == 1 and takes(a, summed=True)
    return [given_gradient(case), *operands, terms, case.features**-0.5, safe, summed, sequences]


def on_host(given: list[Any], options: HostRun | None = None) -> list[Tensor]:
    return on_lanes(partial(gradients_call, *given), options=options)


@gxx
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.every(2)
def test_values(name: str, sequences: int) -> None:
    """A CTA takes one sequence, or several after one another."""
    given = arguments(TRAINED[name], sequences=sequences)
    assert judged_gradients(on_host(given), given)


@gxx
def test_rows_that_keep_nothing() -> None:
    """Their gradients are zero, or no number where softmax has none of them."""
    case = TRAINED["shifted windows"]
    for safe in (True, False):
        given = arguments(case, safe)
        got = on_host(given)
        assert judged_gradients(got, given)
        empty = torch.isneginf(sum(given[4]).repeat(3, 1, 1, 1)).all(-1)[:, 0]  # pyright: ignore
        rows = got[0][:, :, 0][empty]
        assert len(rows) and (not rows.any() if safe else bool(rows.isnan().all()))


@gxx
@pytest.mark.parametrize("name", ["shifted windows", "a bias and padding, not in registers"])
def test_lanes_do_not_race(name: str) -> None:
    given = arguments(TRAINED[name])
    assert judged_gradients(on_host(given, HostRun(sanitize=True)), given)


@gxx
def test_any_order_of_lanes_gives_the_same_bits() -> None:
    given = arguments(TRAINED["a window of Swin's"])
    first, *others = (on_host(given, HostRun(seed=seed)) for seed in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


OWN, SHARED = "few_keys_gradients.cuh", "few_keys.cuh"
BEHIND = "store(scores, 0, batch, query, QUERIES, p.scale);\n    }\n    lanes::all_together();\n"
MUTANTS = {
    "weights are read too early": (OWN, BEHIND, BEHIND.replace("    lanes::all_together();\n", ""), True),
    "what is staged is written over": (OWN, "    lanes::together();  // what", "    // what", True),
    "the mean is not taken away": (OWN, "(scores.scores[j][k] - mean)", "scores.scores[j][k]", False),
    "weights do not add up to one": (OWN, "weights.scores[j][k] *= over;", "", False),
    "gradients are not summed": (OWN, "sums[j][k] += scores", "sums[j][k] = scores", False),
    "keys' by another gradient": (OWN, "turned(by_key, smem + SCORES_AT", "turned(by_key, smem + WEIGHTS_AT", False),
    "values' by queries": (OWN, "+ 2 * own, here + GIVEN_AT)", "+ 2 * own, here)", False),
    "the next sequence in the place of this one": (OWN, "load(p, next, batch", "load(p, here, batch", False),
    "keys that are not there": (SHARED, "= nothing();\n        most", "= s;\n        most", False),
    "the same queries each time": (OWN, "LONG ? turn * ROWS : 0", "LONG ? first * ROWS : 0", False),
    "a long head's last part alone": (OWN, "if (!LONG) clear(by_key)", "if (true) clear(by_key)", False),
    "not multiplied by the scale": (OWN, "own, KEYS, p.scale", "own, KEYS, 1.0f", False),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(3)
def test_mutants_are_caught(name: str) -> None:
    header, old, new, races = MUTANTS[name]
    given = arguments(TRAINED["a long head" if "LONG" in old else "a window of Swin's"])
    assert is_caught(lambda options: judged_gradients(on_host(given, options), given), header, old, new, races)


@pytest.mark.parametrize("name", TRAINED)
def test_what_it_means(name: str) -> None:
    """Autograd's gradients of the attention, of rows that keep something: of others it makes no number."""
    gradient, *given = arguments(TRAINED[name])
    given[3] = [t.clamp_min(-100.0) for t in given[3]]
    leaves = [t.double().requires_grad_() for t in given[:3]]
    terms = [t.double().requires_grad_() for t in given[3]]
    out = short_attention(*leaves, terms, *given[4:6])  # type: ignore[arg-type]
    want = torch.autograd.grad(out, [*leaves, *terms], gradient.double())
    got = GRADIENTS(gradient.double(), *[t.detach() for t in leaves], [t.detach() for t in terms], *given[4:])
    others = got[2].sum(0) if got[2].dim() == 6 else got[1]
    rows = [*got[0].unbind(2), *(others.unbind(2) if got[0].shape[2] == 1 else ())]
    for made, right in zip(rows, want, strict=False):
        torch.testing.assert_close(made.transpose(1, 2), right)
    if given[6]:
        torch.testing.assert_close(got[2].sum(0, keepdim=True), want[3])


SHAPES = {
    "Swin-T's first, 16 images": (Attention(1024, 3, 49, 49, 32, terms=1), True),
    "shifted": (Attention(1024, 3, 49, 49, 32, period=64, terms=2), True),
    "CLIP-B/32": (Attention(64, 12, 50, 50, 64), False),
    "64 keys of 64": (Attention(64, 12, 64, 64, 64, terms=1, paired=True), True),
    "BERT": (Attention(8, 12, 128, 128, 64), False),
    "BERT with padding": (Attention(8, 12, 128, 128, 64, period=8, terms=1, paired=True), False),
    "two terms, 128 keys": (Attention(8, 12, 128, 128, 64, period=8, terms=2), False),
    "16 features": (Attention(8, 12, 20, 20, 16), False),
    "PVT's first": (Attention(32, 1, 3136, 49, 64), False),
    "a long head with a mask": (Attention(8, 2, 784, 49, 32, period=8, terms=1), False),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.every(3)
def test_compiles_without_spills(name: str) -> None:
    a, summed = SHAPES[name]
    lanes = kernel(a, each(a), summed)
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0


def test_sizes() -> None:
    """An H200's SMs have all CTAs at once; gradients of queries, keys and values lie together where they can."""
    swin, shifted = SHAPES["Swin-T's first, 16 images"][0], SHAPES["shifted"][0]
    assert (each(swin), each(shifted), each(SHAPES["BERT"][0])) == (8, 8, 1)
    assert shapes(swin, 8, True) == ((1024, 49, 3, 3, 32), (0, 49, 2, 3, 32), (128, 3, 49, 49))
    assert shapes(shifted, 8, False)[2][0] == 0 and shapes(shifted, 8, True)[2][0] == 128
    assert shapes(Attention(2, 3, 20, 50, 64), 1, False)[:2] == ((2, 20, 1, 3, 64), (2, 50, 2, 3, 64))
    assert not any(
        takes(Attention(1, 1, q, k, f)) for q, k, f in ((129, 65, 64), (9, 129, 64), (9, 9, 128), (0, 9, 64))
    )
    long = Attention(32, 2, 3136, 49, 32)
    assert each(long) == 12 and shapes(long, 12, False)[1:] == ((0, 49, 2, 2, 32), (5, 32, 49, 2, 2, 32))
    assert takes(Attention(1, 1, 65, 9, 64)) and not takes(Attention(1, 1, 65, 9, 64), summed=True)

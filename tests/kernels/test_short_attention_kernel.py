"""Attention over few keys: its kernel on the host, a fiber a lane, and compiled; what it means; its predictions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from host_runs import gxx, is_caught
from short_attentions import CASES, Case, judged
from torch import Tensor

from tilestream import reference
from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.short_attention import call
from tilestream.devices import get
from tilestream.graph.short_attention import SHORT
from tilestream.kernels.costs import Amount
from tilestream.kernels.operators.few_keys import Attention, pipeline
from tilestream.kernels.operators.short_attention import NAME, counts, grid_of, kernel


def on_host(
    case: Case,
    operands: list[Tensor],
    terms: list[Tensor],
    safe: bool = True,
    sms: int = 1,
    options: HostRun | None = None,
) -> Tensor:
    scale = case.features**-0.5
    made = partial(call, *operands, terms, scale, safe, sms, encode=encoded)
    return on_lanes(made, options=options)[0].transpose(1, 2)  # pyright: ignore


@gxx
@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(4)
def test_values(name: str, sms: int) -> None:
    """Few SMs take sequences after one another, many one each."""
    case = CASES[name]
    operands, terms = case.operands(), case.terms()
    got = on_host(case, operands, terms, sms=sms)
    assert judged(got, case, operands, terms, case.features**-0.5)


@gxx
@pytest.mark.parametrize("name", ["shifted windows", "a bias and padding, not in registers"])
def test_rows_that_keep_nothing(name: str) -> None:
    """Zeros as of PyTorch's attention with a mask, or no number, as softmax has it."""
    case = CASES[name]
    operands, terms = case.operands(), case.terms()
    for safe in (True, False):
        got = on_host(case, operands, terms, safe)
        empty = torch.isneginf(sum(terms).repeat(case.batches // 2, 1, 1, 1)).all(-1)  # pyright: ignore
        rows = got[empty.expand(got.shape[:3])]
        assert len(rows) and (not rows.any() if safe else bool(rows.isnan().all()))
        assert judged(got, case, operands, terms, case.features**-0.5, safe)


@gxx
def test_a_bias_that_lies_otherwise() -> None:
    """Expanded, as a library's kernel wants it; with heads last, as a table of distances has it; a column for all."""
    case = Case(4, 2, 20, 32)
    operands = case.operands()
    bias = torch.randn(20, 20, 2).bfloat16().permute(2, 0, 1)[None]
    for terms in ([bias.expand(4, -1, -1, -1)], [bias], [torch.randn(1, 1, 20, 1).bfloat16()]):
        assert judged(on_host(case, operands, terms), case, operands, terms, 32**-0.5)


@gxx
@pytest.mark.parametrize("name", ["shifted windows", "a bias and padding, not in registers", "256 keys"])
def test_lanes_do_not_race(name: str) -> None:
    case = CASES[name]
    operands, terms = case.operands(), case.terms()
    got = on_host(case, operands, terms, options=HostRun(sanitize=True))
    assert judged(got, case, operands, terms, case.features**-0.5)


STAGED = "    lanes::together();\n#pragma unroll\n"
NEXT = "load(p, next, batch + p.period"
SHARED = {"keys that are not there", "rows that are not there", "the mask of another window", "values are not turned"}
SHARED |= {"rows of nothing", "results are read too early"}
"""Mutants of ``few_keys.cuh``."""
MUTANTS = {
    "read before all have loaded": ("    lanes::all_together();\n", "", True),
    "results are read too early": (STAGED, "#pragma unroll\n", True),
    "keys that are not there": ("= nothing();\n        most", "= s;\n        most", False),
    "rows that are not there": ("if (row < rows) lanes", "if (true) lanes", False),
    "the mask of another window": ("group * stride[0]", "0 * stride[0]", False),
    "the next sequence in the place of this one": (NEXT, NEXT.replace("next", "here"), False),
    "values are not turned": ("lanes::matrices_turned", "lanes::matrices", False),
    "rows of nothing": ("now = now == nothing() ? 0.0f : now;", "", False),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(3)
def test_mutants_are_caught(name: str) -> None:
    old, new, races = MUTANTS[name]
    case = CASES["shifted windows"]
    operands, terms = case.operands(), case.terms()

    def right(options: HostRun) -> bool:
        return judged(on_host(case, operands, terms, options=options), case, operands, terms, case.features**-0.5)

    assert is_caught(right, "few_keys.cuh" if name in SHARED else "short_attention.cuh", old, new, races)


@pytest.mark.parametrize("name", CASES)
def test_what_it_means(name: str) -> None:
    """The pipeline on the reference machine, which has no number for a row that keeps nothing."""
    case = CASES[name]
    operands, terms = case.operands(), case.terms()
    period = max([1, *(len(t) for t in terms)])
    shape = (case.batches, case.heads, case.queries, operands[1].shape[2], case.features)
    p = pipeline(Attention(*shape, period=period, terms=len(terms)), [t.shape for t in terms], 0.3)
    given = {k: t.transpose(1, 2).unflatten(0, (-1, period)) for k, t in zip("QKV", operands, strict=True)}
    given |= {f"T{n}": t.reshape([size for size in t.shape if size > 1]) for n, t in enumerate(terms)}
    (made,) = reference.run(p, given, precision="float64").values()
    want = SHORT(*(t.double() for t in operands), [t.double() for t in terms], 0.3, False)
    torch.testing.assert_close(made.flatten(0, 1).transpose(1, 2), want, equal_nan=True)


SWIN, SHIFTED = [(1, 3, 49, 49)], [(1, 3, 49, 49), (64, 1, 49, 49)]
SHAPES = {
    "Swin-T's first, 16 images": (Attention(1024, 3, 49, 49, 32, terms=1), SWIN),
    "shifted": (Attention(1024, 3, 49, 49, 32, period=64, terms=2), SHIFTED),
    "Swin-T's last": (Attention(16, 24, 49, 49, 32, terms=1), [(1, 24, 49, 49)]),
    "ViT-B, 8 images": (Attention(8, 12, 197, 197, 64), []),
    "ViT-tiny, 64 images": (Attention(64, 3, 197, 197, 64, "f16"), []),
    "BEiT": (Attention(8, 12, 197, 197, 64, terms=1), [(1, 12, 197, 197)]),
    "BERT": (Attention(8, 12, 128, 128, 64), []),
    "BERT with padding": (Attention(8, 12, 128, 128, 64, period=8, terms=1, paired=True), [(8, 1, 1, 128)]),
    "MPNet": (Attention(8, 12, 128, 128, 64, period=8, terms=2, paired=True), [(1, 12, 128, 128), (8, 1, 1, 128)]),
    "a query, 196 keys": (Attention(8, 6, 1, 196, 64), []),
    "64 keys of 64": (Attention(64, 8, 64, 64, 64, terms=1, paired=True, safe=False), [(1, 8, 64, 64)]),
    "256 keys": (Attention(4, 12, 256, 256, 64), []),
    "176 keys, two terms": (Attention(4, 12, 176, 176, 64, terms=2), [(1, 12, 176, 176)] * 2),
    "128 features": (Attention(4, 12, 128, 128, 128, terms=1), [(1, 12, 128, 128)]),
    "16 features": (Attention(4, 12, 255, 255, 16), []),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.every(3)
def test_compiles_without_spills(name: str) -> None:
    shape, _ = SHAPES[name]
    grid = grid_of(shape, 132)
    lanes = kernel(shape, grid)
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * lanes.warps * grid.resident <= 65536


def test_grids() -> None:
    """Windows fill the GPU once, and each CTA takes several; of few long sequences queries are divided."""
    windows, few = (SHAPES[name][0] for name in ("Swin-T's first, 16 images", "ViT-B, 8 images"))
    grid = grid_of(windows, 132)
    assert grid.held(windows) and grid.each > 1 and grid.ctas(windows) <= 132 * grid.resident
    assert grid.ctas(windows) * grid.each >= 1024 * 3
    grid = grid_of(few, 132)
    assert grid.splits > 1 and grid.tiles(few) * grid.splits >= few.tiles and grid.ctas(few) > 132


def test_predictions() -> None:
    """Of windows memory and instructions take alike; queries, keys, values and results are counted once."""
    a, terms = SHAPES["Swin-T's first, 16 images"]
    made = counts(a, terms, get("h200"))
    dram, cycles = made["dram"], made["cycles"]
    assert isinstance(dram, Amount) and dram.amount == 2 * (4 * 1024 * 49 * 96 + 3 * 49 * 49)
    assert cycles.seconds < 2 * dram.seconds and made.us > 1e6 * dram.seconds
    assert all(counts(*shape, get("h200")).us > 0 for shape in SHAPES.values())

"""Attention over few keys by warpgroups: its kernel on the host, and compiled; which attention has it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from host_runs import gxx, is_caught
from sass import disassemble, disassembler
from short_attentions import WHOLE_HEADS, Case, judged
from torch import Tensor

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.short_attention import call
from tilestream.kernels.operators.few_keys import Attention
from tilestream.kernels.operators.head_attention import NAME, buffers, cycles, groups, kernel, takes
from tilestream.kernels.operators.lanes import LaneKernel
from tilestream.kernels.operators.short_attention import by_groups, has_kernel


def on_host(
    case: Case,
    operands: list[Tensor],
    sms: int = 1,
    options: HostRun | None = None,
    terms: list[Tensor] | None = None,
    safe: bool = True,
) -> Tensor:
    terms = case.terms() if terms is None else terms
    made = partial(call, *operands, terms, case.features**-0.5, safe, sms, encode=encoded)
    assert made().kernel.name == NAME
    return on_lanes(made, options=options)[0].transpose(1, 2)


@gxx
@pytest.mark.parametrize("sms", [1, 5])
@pytest.mark.parametrize("name", WHOLE_HEADS)
@pytest.mark.every(3)
def test_values(name: str, sms: int) -> None:
    """Of one CTA many heads follow each other in its buffers; of five some begin in the middle of a head."""
    case = WHOLE_HEADS[name]
    operands = case.operands()
    assert judged(on_host(case, operands, sms), case, operands, case.terms(), case.features**-0.5)


@gxx
def test_rows_that_keep_nothing() -> None:
    """Zeros as of PyTorch's attention with a mask, or no number, as softmax has it."""
    case = WHOLE_HEADS["a bias and padding"]
    operands, terms = case.operands(), case.terms()
    terms[1][1] = float("-inf")
    for safe in (True, False):
        got = on_host(case, operands, terms=terms, safe=safe)
        assert not got[1::2].any() if safe else bool(got[1::2].isnan().all())
        assert judged(got, case, operands, terms, 0.125, safe)


@gxx
def test_operands_that_no_bulk_copy_reads() -> None:
    """Rows that do not start on 16 bytes, and one sequence for all, are copied."""
    case = Case(2, 2, 66, 64)
    q, k, v = case.operands()
    odd = torch.cat([q.new_zeros(*q.shape[:3], 1), q], 3)[..., 1:]
    operands = [odd, k[:1].expand_as(k), v]
    assert judged(on_host(case, operands), case, operands, [], 0.125)


@gxx
@pytest.mark.parametrize("name", ["a tile and six queries", "one tile a head, f16"])
def test_groups_do_not_race(name: str) -> None:
    case = WHOLE_HEADS[name]
    operands = case.operands()
    assert judged(on_host(case, operands, 2, HostRun(sanitize=True)), case, operands, [], 0.125)


QUERIES = "tile * ROWS, part.head, part.batch, ring.full()"
FREE, FREED = (
    "if (group_leader()) bar_arrive(ring.empty());",
    "for (int k = 0; g == 0 && k < GROUPS; ++k) bar_arrive(ring.empty());",
)
FIRST = "cta * each + (cta < more ? cta : more)"
MUTANTS = {
    "keys that are not there": ("> KEYS && 8 * first + col_of", "> KEYS && false && col_of", False),
    "a share without its first tile": (FIRST, f"{FIRST} + 1", False),
    "another tile's queries": (QUERIES, QUERIES.replace("tile * ROWS", "0"), False),
    "heads for batches": ("unit % p.heads, unit / p.heads", "unit / p.heads, unit % p.heads", False),
    "half of what a row weighs": ("TS_REG(sum, j) = all[0] + all[1];", "TS_REG(sum, j) = all[0];", False),
    "a buffer that is taken back early": (FREE, FREED, True),
    "the mask of another sequence": ("part.batch % p.period * stride[0]", "0 * stride[0]", False),
    "scores that are not scaled": ("2 * j + k), p.scale, more[k])", "2 * j + k), 1.0f, more[k])", False),
    "rows of nothing": ("== nothing() ? 0.0f : TS_REG(most, j)", "== nothing() ? nothing() : TS_REG(most, j)", False),
    "nobody's turn": ("if (!last) named_arrive", "if (false) named_arrive", False),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(6)
def test_mutants_are_caught(name: str) -> None:
    old, new, races = MUTANTS[name]
    plain, masked = Case(4, 3, 70, 64), Case(4, 3, 70, 64, ((2, 1, 70, 70),))
    terms = masked.terms()
    terms[0][1, :, 5] = float("-inf")

    def right(options: HostRun) -> bool:
        operands = plain.operands()
        found = on_host(plain, operands, 1, options), on_host(masked, operands, 1, options, terms)
        wanted = (plain, []), (masked, terms)
        return all(judged(x, case, operands, given, 0.125) for x, (case, given) in zip(found, wanted, strict=True))

    assert is_caught(right, "head_attention.cuh", old, new, races, limit_s=10.0)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "sizes", [(197, 197, "bf16"), (50, 50, "f16"), (130, 8, "bf16"), (256, 256, "bf16"), (257, 257, "f16")]
)
@pytest.mark.every(2)
def test_compiles_to_tensor_cores_without_spills(sizes: tuple[int, int, str]) -> None:
    queries, keys, *dtype = sizes
    for terms, paired in ((0, False), (1, False), (2, True)):
        if not paired or keys % 2 == 0:
            compiles(kernel(Attention(8, 6, queries, keys, 64, *dtype, terms=terms, paired=paired)))


def compiles(lanes: LaneKernel) -> None:
    made = compile_text(lanes.text, lanes.name, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * lanes.warps <= 65536
    if disassembler() is not None:
        code = disassemble(made.cubin)
        assert code.having("HGMMA") and code.having("UTMALDG") and code.having("UTMASTG")
        assert not code.having("LDL", "STL")


def test_which_kernel() -> None:
    """Warpgroups where tiles are full; a warp's rows for windows, and for one query."""
    whole = Attention(64, 6, 197, 197, 64)
    assert by_groups(whole, 132) and cycles(whole, 132) < cycles(Attention(64, 6, 256, 256, 64), 132)
    for other in (
        Attention(1024, 3, 49, 49, 32),
        Attention(8, 12, 1, 197, 64),
        Attention(4, 12, 128, 128, 128),
    ):
        assert not takes(other) and has_kernel(other) and not by_groups(other, 132)
    long = Attention(8, 12, 257, 257, 64)
    assert has_kernel(long) and by_groups(long, 132) and not has_kernel(replace(long, keys=273))
    assert not has_kernel(replace(long, terms=3)) and not has_kernel(replace(long, keys=0))


def test_buffers_feed_all_groups() -> None:
    """A small head has as many buffers as two tiles of each group need; two of the largest fit."""
    small, large = Attention(8, 8, 50, 50, 64), Attention(8, 8, 272, 272, 64)
    assert buffers(small) * 1 >= 2 * groups(small) and (buffers(large), groups(large)) == (2, 2)
    assert buffers(Attention(8, 8, 1400, 256, 64)) == 0
    assert all(kernel(a).shared_bytes + 1024 <= 228 * 1024 for a in (small, large))

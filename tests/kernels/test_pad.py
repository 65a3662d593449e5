"""Padded copies of matrices: the kernel on the host, a fiber a lane, and compiled; the operator."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from host_runs import gxx, is_caught
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.pad import call
from tilestream.graph.rewrites.operators import PADDED
from tilestream.kernels.operators.pad import NAME, WARPS, kernel

BF16, F16 = torch.bfloat16, torch.float16


def matrices(rows: tuple[int, ...], k: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(k)
    return [torch.randn(n, k, generator=generator).to(dtype) for n in rows]


def padded_on_host(given: list[Tensor], columns: int, begin: int = 0, options: HostRun | None = None) -> list[Tensor]:
    """Matrices behind ``begin`` elements, so that they start on no 16 bytes."""
    behind = [torch.cat([m.new_full((begin,), float("nan")), m.flatten()])[begin:].view(m.shape) for m in given]
    return on_lanes(partial(call, behind, columns), options=options)


def as_torch_pads(given: list[Tensor], columns: int) -> list[Tensor]:
    return [functional.pad(m, (0, columns - m.shape[1])) for m in given]


@gxx
@pytest.mark.parametrize("k", [1, 7, 9, 250, 257, 479, 519])
@pytest.mark.parametrize("begin", [0, 3])
def test_values(k: int, begin: int) -> None:
    """Rows that start at every even address modulo 16, of one piece and of more than a warp's 64."""
    given, columns = matrices((9, 4), k, F16 if begin else BF16), -(-k // 8) * 8
    for got, want in zip(padded_on_host(given, columns, begin), as_torch_pads(given, columns), strict=True):
        assert torch.equal(got, want)


@gxx
def test_whole_pieces_at_odd_places() -> None:
    given = matrices((5,), 16)
    (got,) = padded_on_host(given, 16, begin=5)
    assert torch.equal(got, given[0])


@gxx
def test_lanes_do_not_race() -> None:
    given = matrices((9,), 479)
    (got,) = padded_on_host(given, 480, options=HostRun(sanitize=True))
    assert torch.equal(got, as_torch_pads(given, 480)[0])


MUTANTS = {
    "what lies behind a row is kept": ("both & 0xffff", "both"),
    "the second vector is read too late": ("> PIECE) lanes", "> PIECE + 2) lanes"),
    "half words stay where they are": ("shift & 2 ?", "shift & 1 ?"),
    "the second matrix is the first again": ("row -= p.matrices[m].rows", "row -= 0"),
    "a row's last pieces are left out": ("k += 2 * LANES", "k += 4 * LANES"),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str) -> None:
    given = matrices((9, 4), 519)

    def right(options: HostRun) -> bool:
        return all(map(torch.equal, padded_on_host(given, 520, options=options), as_torch_pads(given, 520)))

    assert is_caught(right, "pad.cuh", *MUTANTS[name])


@pytest.mark.nvrtc
def test_compiles_without_spills_for_six_ctas_an_sm() -> None:
    made = compile_text(kernel(2).text, NAME, 0)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * WARPS * 6 <= 65536


def test_the_operator_means_pads_and_tells_their_shapes() -> None:
    given = matrices((9, 4), 479)
    for got, want in zip(PADDED(given, 480), as_torch_pads(given, 480), strict=True):
        assert torch.equal(got, want) and got.is_contiguous()
    with FakeTensorMode() as mode:
        made = PADDED([mode.from_tensor(m) for m in given], 480)
    assert [tuple(m.shape) for m in made] == [(9, 480), (4, 480)]

"""Attention over few keys: its kernel on the host, a thread a lane, and compiled."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from host_runs import CAUGHT
from short_attentions import CASES, Case, judged
from torch import Tensor

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun, Mutation
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.short_attention import call
from tilestream.kernels.operators.short_attention import NAME, Attention, grid_of, kernel

gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def on_host(
    case: Case, operands: list[Tensor], terms: list[Tensor], safe: bool = True, sms: int = 1, options: HostRun | None = None
) -> Tensor:
    scale = case.features**-0.5
    return on_lanes(partial(call, *operands, terms, scale, safe, sms), options=options)[0].transpose(1, 2)  # pyright: ignore


@gxx
@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, sms: int) -> None:
    """Few SMs take sequences after one another, many one each."""
    case = CASES[name]
    operands, terms = case.operands(), case.terms()
    got = on_host(case, operands, terms, sms=sms)
    assert judged(got, case, operands, terms, case.features**-0.5)

"""Weights that lie transposed: which do, and the kernel that copies them."""

from __future__ import annotations

import pytest
import torch

from tilestream.cuda.cache import compiled
from tilestream.cuda.turn import lies_transposed
from tilestream.kernels.operators.turn import kernel


def test_what_lies_transposed() -> None:
    weight = torch.zeros(24, 40)
    assert lies_transposed(weight.t()) and lies_transposed(weight[:, 3:30].t())  # with gaps too
    assert not lies_transposed(weight) and not lies_transposed(weight.t().contiguous())
    assert not lies_transposed(weight.t()[::2]) and not lies_transposed(weight[0])
    assert not lies_transposed(weight[:, :1]) and not lies_transposed(torch.zeros(1, 40).expand(24, 40))


@pytest.mark.nvrtc
def test_the_kernel_compiles() -> None:
    assert b"tilestream_turn" in compiled(kernel(1).source).cubin

"""Modules through ``torch.compile`` with ``target="reference"``, and what is held of their results."""

from __future__ import annotations

from typing import Any

import near_eager
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilestream.run.backend import tilestream

REFERENCE = {"target": "reference"}


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend=tilestream, options=REFERENCE | options)


def check(module: nn.Module, *inputs: Tensor, fast: Any = None, **options: Any) -> None:
    """Compile and run ``module``: as near to float64 as eager, twice the same, laid out alike."""
    fast = compiled(module, **options) if fast is None else fast
    with torch.no_grad():
        got, again = pytree.tree_leaves(fast(*inputs)), pytree.tree_leaves(fast(*inputs))
    eager = near_eager.check(got, module, inputs)
    for a, b, plain in zip(got, again, eager, strict=True):
        assert torch.equal(a, b)
        assert (a.shape, a.dtype, a.stride()) == (plain.shape, plain.dtype, plain.stride())

"""The oracle in a line: results as near to float64 as eager's, within twice its error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilestream.run import oracle


def check(got: Sequence[Tensor], module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Hold ``got`` against ``module``, of one floating dtype, on ``inputs``; returns eager's results.

    Parameters and buffers keep their bits: the module goes to float64 and back.
    """
    with torch.no_grad():
        eager = pytree.tree_leaves(module(*inputs))
        kept = {name: p.detach().clone() for name, p in module.state_dict().items()}
        exact = pytree.tree_leaves(module.double()(*(x.double() for x in inputs)))
        module.to(eager[0].dtype).load_state_dict(kept)
    error, own, good = oracle.judge(got, eager, exact)
    assert good, f"error {error:.2e}, eager's {own:.2e}"
    return eager

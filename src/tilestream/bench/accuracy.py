"""A module's float64 and eager results on its inputs, to judge any number of results by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilestream import oracle
from tilestream.errors import CaptureError


@dataclass(frozen=True)
class Accuracy:
    """Relative errors against float64, the worst over the outputs, and whether all are within tolerance.

    ``eager_error`` is that of PyTorch in eager mode at the same precision, what the tolerance is made from.
    """

    error: float
    eager_error: float
    ok: bool


class Oracle:
    """Runs ``module`` eagerly, and a float64 copy of it, once each.

    Raises:
        CaptureError: the module does not run on these inputs.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[object], keywords: Mapping[str, object] | None = None
    ) -> None:
        given = (tuple(inputs), dict(keywords or {}))
        try:
            with torch.no_grad():
                double = copy.deepcopy(module).double()
                self.eager = tensors(module(*given[0], **given[1]))
                args, named = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, given)
                self.exact = tensors(double(*args, **named))
        except (RuntimeError, TypeError, ValueError) as failure:
            cause = f"the model does not run on its inputs: {str(failure).splitlines()[0]}"
            raise CaptureError(cause, "make it run eagerly and in float64 first") from failure

    def judge(self, result: object) -> Accuracy:
        """Hold ``result``, of the module's own form, against float64; another dtype counts as wrong."""
        got = tensors(result)
        error, eager_error, ok = oracle.judge(got, self.eager, self.exact)
        same = [g.dtype for g in got] == [e.dtype for e in self.eager]
        return Accuracy(error, eager_error, ok and same)


def tensors(result: object) -> tuple[Tensor, ...]:
    """The tensors of a module's result, in order: a tensor, or (nested) tuples, lists and dicts of them."""
    return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


def repeatable(run: Callable[[], object]) -> bool:
    """Whether two runs on the same input give the same bits."""
    first = [x.clone() for x in tensors(run())]
    return all(_same_bits(a, b) for a, b in zip(first, tensors(run()), strict=True))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

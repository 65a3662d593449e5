"""A module's float64 and eager results on its inputs, to judge any number of results by."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilestream.errors import CaptureError, InputError
from tilestream.graph.state import State, named, same_bits
from tilestream.run import oracle


@dataclass(frozen=True)
class Accuracy:
    """Relative errors against float64, the worst over the outputs, and whether all are within tolerance.

    ``eager_error`` is that of PyTorch in eager mode at the same precision, what the tolerance is made from.
    """

    error: float
    eager_error: float
    ok: bool


@contextlib.contextmanager
def _captured(how: str, remedy: str) -> Iterator[None]:
    """What a model raises inside, as a ``CaptureError``: that it does not run ``how``."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as failure:
        first = next(iter(str(failure).splitlines()), type(failure).__name__)
        raise CaptureError(f"the model does not run {how}: {first}", remedy) from failure


class Oracle:
    """Runs ``module`` eagerly, and in float64, once each. It leaves inputs, buffers, attributes and
    random number generators as they were.

    What the model writes to (inputs, parameters, buffers) counts as results too, where ``check`` runs it.

    Raises:
        CaptureError: the module does not run on these inputs, or not in float64.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[object], keywords: Mapping[str, object] | None = None
    ) -> None:
        given = (tuple(inputs), dict(keywords or {}))
        self._module, self._inputs = module, tensors(given)
        self._state = State(module, given)
        in_float64 = "in float64, which results are held against", "check a part of it that does"
        with torch.no_grad():
            with _captured(*in_float64):
                wide = copy.deepcopy(module).double()
                args, keys = pytree.tree_map_only(Tensor, _widened, given)
            with _captured("on its inputs", "make it run eagerly first"):
                self.eager = tuple(x.clone() for x in tensors(module(*given[0], **given[1])))
            with _captured(*in_float64), oracle.Float64():
                self.exact = tensors(wide(*args, **keys))
        after = named(wide, tensors((args, keys)))
        self._written = tuple(name for name in self._state.written() if name in after)
        self._eager_state = self._now()
        self._exact_state = tuple(after[name] for name in self._written)
        self._state.restore()

    def _now(self) -> tuple[Tensor, ...]:
        """What the model writes to, as it is now."""
        found = named(self._module, self._inputs)
        return tuple(found[name].detach().clone() for name in self._written)

    def not_finite(self) -> float:
        """The share of the elements in float64 that are NaN or infinite: only their places and signs are compared.

        Raises:
            InputError: all are, so that nothing could be found wrong.
        """
        exact = [x for x in (*self.exact, *self._exact_state) if x.is_floating_point() or x.is_complex()]
        number = sum(x.numel() for x in exact)
        if not number:
            return 0.0
        share = sum(int((~torch.isfinite(x)).sum()) for x in exact) / number
        if share == 1.0:
            raise InputError(
                "every element of the model's result in float64 is NaN or infinite: there is nothing to compare",
                "give it finite inputs and weights",
            )
        return share

    def check(self, run: Callable[[], object]) -> Accuracy:
        """Call ``run``, which runs the module, from the first state; hold results and state against float64."""
        self._state.restore()
        got = (*(x.clone() for x in tensors(run())), *self._now())
        return _accuracy(got, (*self.eager, *self._eager_state), (*self.exact, *self._exact_state))

    def judge(self, result: object) -> Accuracy:
        """Hold ``result``, of the module's own form, against float64; another dtype counts as wrong."""
        return _accuracy(tensors(result), self.eager, self.exact)

    def repeatable(self, run: Callable[[], object]) -> bool:
        """Whether two runs from the first state give the same bits, and write the same."""
        found = []
        for _ in range(2):
            self._state.restore()
            found.append((*(x.clone() for x in tensors(run())), *self._now()))
        return all(same_bits(a, b) for a, b in zip(*found, strict=True))


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.clone()


def _accuracy(got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> Accuracy:
    error, eager_error, ok = oracle.judge(got, eager, exact)
    same = [g.dtype for g in got] == [e.dtype for e in eager]
    return Accuracy(error, eager_error, ok and same)


def tensors(result: object) -> tuple[Tensor, ...]:
    """The tensors of a module's result, in order: a tensor, or (nested) tuples, lists and dicts of them."""
    return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


def repeatable(run: Callable[[], object]) -> bool:
    """Whether two runs on the same input give the same bits."""
    first = [x.clone() for x in tensors(run())]
    return all(same_bits(a, b) for a, b in zip(first, tensors(run()), strict=True))

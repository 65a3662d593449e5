"""Sizes that may be symbolic: compared, multiplied and guessed without guards."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import sympy
import torch


def expression(dim: int | torch.SymInt) -> sympy.Expr:
    """A dimension as a sympy expression, so that symbolic sizes can be compared without guards."""
    return sympy.Integer(dim) if isinstance(dim, int) else dim.node.expr


def settled(dim: int | torch.SymInt) -> int | torch.SymInt:
    """The number, where a guard has fixed a symbolic dimension: the inputs of a weight that is not symbolic do."""
    known = expression(dim)
    return int(known) if known.is_Integer else dim


def product(dims: Sequence[int | torch.SymInt]) -> sympy.Expr:
    """The product of dimensions, expanded, so that equal products compare equal."""
    if all(isinstance(d, int) for d in dims):
        return sympy.Integer(math.prod(map(int, dims)))
    return sympy.expand(sympy.prod([expression(d) for d in dims]))


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two dimensions are known to be equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return expression(a) == expression(b)


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes, or strides, are known to be equal."""
    return len(a) == len(b) and all(map(same_size, a, b))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are known to have one shape."""
    return same_sizes(a.shape, b.shape)


def hint(dim: int | torch.SymInt) -> int:
    """The size that a symbolic dimension has in the call that is being compiled; the most it can have where the GPU is
    to say, as of rows that a mask selects, and 1024 where nothing says how many that is."""
    if isinstance(dim, int):
        return dim
    if dim.node.has_hint():
        return int(dim.node.hint)
    most = dim.node.shape_env.bound_sympy(dim.node.expr).upper
    return int(most) if most.is_Integer and most < sys.maxsize else 1024

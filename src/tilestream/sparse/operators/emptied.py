"""Masks that leave nothing of a row: what a softmax of such a row is.

What a mask drops is not stored, and stands for minus infinity. A fiber of which nothing is stored would so be left out,
and be 0 after a softmax; PyTorch's is not a number there (or the mean, where the mask fills with a large number that is
finite). So the fibers of a mask that store nothing are stored whole, with the fill as their values.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Move, Statement
from tilestream.sparse.moves import bare_fibers, perform
from tilestream.sparse.recorder import Condition, Recorder, View
from tilestream.sparse.storage import SparseTensor, compressed, from_torch, prune

_LOW = -1e6
_SMALL = ("exp", "sigmoid", "tanh", "relu", "sin", "cos", "gt", "ge", "lt", "le", "eq", "ne")
"""Operators whose results are not low, whatever they read."""


def dropped(rec: Recorder, x: View, keep: Condition, fill: float) -> View | None:
    """``x`` where a mask from outside stores something, and minus infinity, unstored, elsewhere.

    None if fibers along which the result is folded may be empty, and cannot be stored whole.

    Raises:
        SparseError: ``x`` was masked before and changed since.
    """
    mask = keep.view
    if not keep.zeros:
        rec.compress(mask.tensor)
    if rec.folded is not None and not rec.folded:
        return _named(rec, x, keep, fill, rec.binary("mask", x, mask, "", fill=-math.inf))
    if x.tensor in rec.dropped:
        earlier, first, filled = rec.dropped[x.tensor]
        joined = _both(rec, first, keep) if filled == fill else None
        if joined is None:
            return None
        x, keep, mask = earlier, joined, joined.view
    elif _is_masked(rec, x.tensor):
        raise SparseError(f"a mask of what another mask filled ({rec.source})", "join the masks with & first")
    rank = len(mask.shape)
    folded = range(-len(x.shape), 0) if rec.folded is None else rec.folded
    if any(-d > rank or mask.dims[d] is None for d in folded):
        return None  # the mask is the same all along the fiber
    dims = [dim for d in folded if (dim := mask.dims[d]) is not None]
    example = _example(rec, keep)
    broken = [dim for dim in dims if example is None or len(bare_fibers(example, dim))]
    if not broken:
        rec.unbroken |= {(mask.tensor, dim) for dim in dims}
        made = rec.binary("mask", x, mask, "", fill=-math.inf)
    elif len(dims) == 1:
        made = _whole(rec, x, mask, dims[0], fill)
    else:
        return None
    return _named(rec, x, keep, fill, made)


def _named(rec: Recorder, x: View, keep: Condition, fill: float, made: View) -> View:
    rec.dropped[made.tensor] = x, keep, fill
    return made


def _whole(rec: Recorder, x: View, mask: View, dim: int, fill: float) -> View:
    """``x`` under a mask whose empty fibers along its dimension ``dim`` are stored, with ``fill`` as their values."""
    shape = rec.shapes[mask.tensor]
    whole = replace(mask, tensor=rec.move("whole", [mask.tensor], shape, (dim,), f"{mask.tensor}_whole"))
    bare = replace(mask, tensor=rec.move("bare", [mask.tensor], shape, (dim,), f"{mask.tensor}_bare"))
    kept = rec.binary("keep", x, whole, "_kept")
    filled = rec.binary("add", kept, rec.unary("pick", bare, "_fill", fill), "_filled")
    return rec.binary("mask", filled, whole, "", fill=-math.inf)


def _both(rec: Recorder, first: Condition, second: Condition) -> Condition | None:
    """The mask of what two keep, where they are of one shape."""
    a, b = first.view, second.view
    if a.shape != b.shape or a.dims != b.dims or rec.shapes[a.tensor] != rec.shapes[b.tensor]:
        return None
    name = rec.move("both", [a.tensor, b.tensor], rec.shapes[a.tensor], (), f"{rec.at}_masks")
    return Condition(replace(a, tensor=name), True, True)


def _is_masked(rec: Recorder, name: str) -> bool:
    """Whether what a tensor does not store may be minus infinity."""
    steps, _ = _made_of(rec, name, ("exp", "zeroed"))
    return any(isinstance(s, Statement) and s.op == "mask" and s.fill != 0 for s in steps)


def is_low(rec: Recorder, name: str) -> bool:
    """Whether a tensor may have scores about as low as a fill that stands for minus infinity: filled in, or given."""
    steps, outside = _made_of(rec, name, _SMALL)
    if any(isinstance(s, Statement) and s.scalar is not None and s.scalar <= _LOW for s in steps):
        return True
    given = (_numbers(rec, one) for one in outside)
    return any(values is not None and bool(np.any(values <= _LOW)) for values in given)


def _made_of(rec: Recorder, name: str, ends: Collection[str]) -> tuple[list[Statement | Move], list[str]]:
    """The steps that make a tensor, without those of ``ends`` and what these read, and the tensors from outside."""
    made = {step.name: step for step in rec.steps}
    steps, outside, seen, stack = [], [], {name}, [name]
    while stack:
        step = made.get(found := stack.pop())
        if step is None:
            outside.append(found)
        elif isinstance(step, Move) or step.op not in ends:
            steps.append(step)
            reads = step.operands if isinstance(step, Move) else tuple(a.tensor for a in step.operands)
            stack += [one for one in reads if one not in seen]
            seen.update(reads)
    return steps, outside


def _numbers(rec: Recorder, name: str) -> np.ndarray | None:
    """What a tensor from outside stores."""
    value = rec.constants.get(name, rec.examples.get(name))
    if isinstance(value, torch.Tensor):
        value = value.detach().double().numpy() if value.layout == torch.strided else from_torch(name, value)
    return value.values if isinstance(value, SparseTensor) else value


def _example(rec: Recorder, keep: Condition) -> SparseTensor | None:
    """The mask that the program is compiled with, without what it stores as false."""
    found = _value(rec, keep.view.tensor)
    return found if found is None or keep.zeros else prune(found)


def _value(rec: Recorder, name: str) -> SparseTensor | None:
    """What a tensor from outside, as it is or moved, holds."""
    if name in rec.constants:
        return rec.constants[name]
    if name in rec.examples:
        value = rec.examples[name]
        if isinstance(value, SparseTensor):
            return value
        return from_torch(name, value, compressed(value.ndim) if not value.is_sparse else None)
    step = next((s for s in rec.steps if s.name == name), None)
    if not isinstance(step, Move):
        return None
    operands = [_value(rec, x) for x in step.operands]
    known = [x for x in operands if x is not None]
    return perform(step, known) if len(known) == len(operands) else None


__all__ = ["dropped"]

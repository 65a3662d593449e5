"""The tensors of a pipeline of any axes: what was given, and outputs that nobody has written yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor as Array

from tilestream.errors import InputError
from tilestream.ir.axes import ROWS
from tilestream.ir.pipeline import Pipeline, Role, TileOp
from tilestream.ir.taps import pictures
from tilestream.reference.einsum import evaluate
from tilestream.reference.ops import Arithmetic
from tilestream.reference.segments import Positions, Segments, segments_of
from tilestream.reference.workers import coordinate


class Memory:
    """Of one run: tensors by name in the type that is computed in, sizes of axes, where ragged ones lie.

    Raises:
        InputError: as ``sizes_given``.
    """

    def __init__(self, p: Pipeline, tensors: Mapping[str, Array], arithmetic: Arithmetic) -> None:
        self.p, self.arithmetic = p, arithmetic
        self.size, self.segments = sizes_given(p, tensors)
        self.memory = {n: arithmetic.widen(x) if x.is_floating_point() else x for n, x in tensors.items()}
        added = {op.params[-1] for s in p.stages for op in s.ops if op.kind == "store_add"}
        for t in p.by_role(Role.OUTPUT):
            fill = 0.0 if t.name in added else torch.nan
            self.memory[t.name] = torch.full([self.size[a.name] for a in t.axes], fill, dtype=arithmetic.dtype)

    def outputs(self) -> dict[str, Array]:
        """As memory holds them."""
        return {t.name: self.arithmetic.stored(self.memory[t.name], t.dtype) for t in self.p.by_role(Role.OUTPUT)}

    def store(self, op: TileOp, value: Array, at: Positions) -> None:
        """A store, or an addition, of ``value`` at these positions."""
        name, to = op.params[-1], op.views[-1]
        index = torch.broadcast_tensors(*(coordinate(c, at, to.axes, self.memory) for c in to.at or ()))
        value = evaluate(op, [value], {a: len(x) for a, x in at.items()}, self.arithmetic.dtype)
        value = value.expand(index[0].shape) if index else value
        if op.kind == "store_add":
            self.memory[name].index_put_(tuple(index), value, accumulate=True)
        else:
            self.memory[name][tuple(index)] = self.arithmetic.rounded(value, self.p.tensor(name).dtype)


def sizes_given(p: Pipeline, tensors: Mapping[str, Array]) -> tuple[dict[str, int], dict[str, Segments]]:
    """The size of every axis, read off the tensors where it is not declared; and where ragged ones lie."""
    declared = [a for s in p.stages for op in s.ops if op.out is not None for a in op.out.axes]
    size = p.sizes()
    for t in p.tensors:
        if t.name not in tensors:
            continue
        shape = tuple(tensors[t.name].shape)
        if len(shape) != len(t.axes):
            raise InputError(f"tensor {t.name!r} has {len(shape)} dimensions, not {len(t.axes)}", "give it its shape")
        for axis, n in zip(t.axes, shape, strict=True):
            if size.setdefault(axis.name, n) != n:
                raise InputError(
                    f"{t.name!r}: axis {axis.name!r} is {n} here, {size[axis.name]} elsewhere", "make them agree"
                )
    for name, pixels in pictures(p).items():  # where nothing else has rows
        size.setdefault(ROWS.name, tensors[name].shape[0] * pixels)
    segments = segments_of(p, tensors, size)
    for a in declared:
        if a.name not in size:
            raise InputError(f"no tensor has axis {a.name!r}, so its size is not known", "declare the size of the axis")
    return size, segments

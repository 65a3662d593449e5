"""Records an einsum program from whole-tensor operations: broadcasting, transposes and size-1 dimensions go away here.

The tensors of the program have no dimensions of size 1. A ``View`` says how a tensor of PyTorch's shape is seen in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.eager import Eager
from tilestream.sparse.einsum import MASKS, Access, Declared, EinsumProgram, Move, Statement, fresh_name, letters
from tilestream.sparse.outputs import LARGEST, OutputView
from tilestream.sparse.program import declare
from tilestream.sparse.signs import ABOVE, Signs
from tilestream.sparse.storage import Format, SparseTensor, from_torch


@dataclass(frozen=True)
class View:
    """A PyTorch tensor of ``shape``: its dimension ``d`` is dimension ``dims[d]`` of ``tensor``; None: the same value
    all along (size 1, or expanded)."""

    tensor: str
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Gathered(View):
    """Rows of ``source`` by ``index`` along dimension ``dim``, times ``factor``: ``source[index] * factor``.

    A sum over edges of it is a product of ``source`` with the adjacency, whose values are ``factor``.
    """

    source: View
    index: torch.Tensor = field(compare=False)
    dim: int
    factor: View | None = None


@dataclass(frozen=True)
class Condition:
    """Truth values: true where ``view`` is not 0, or (``stored`` False) where it is.

    ``zeros``: a zero that is stored counts as true, as in the structure of a sparse tensor.
    """

    view: View
    stored: bool
    zeros: bool = False


class Recorder:
    """An einsum program in the making. ``at`` and ``source`` say which operator is being recorded."""

    def __init__(self) -> None:
        self.inputs: dict[str, Declared] = {}
        self.steps: list[Statement | Move] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.taken: set[str] = set()
        self.constants: dict[str, SparseTensor] = {}
        self.pruned: set[str] = set()
        """Inputs that store no zeros, since they are masks."""
        self.at, self.source = "", ""
        self.into_softmax = False
        """Whether a softmax is all that reads the operator's result."""
        self.incidences: dict[tuple[object, ...], tuple[str, View]] = {}
        """Matrices made of indices, by what they hold: name and view."""
        self._made: dict[tuple[object, ...], str] = {}
        self._signs = Signs()
        self.narrowest = 53
        """Significant bits of the narrowest floats that results were rounded to."""
        self.folded: frozenset[int] | None = frozenset()
        """Dimensions, from the last (-1), along which the operator's result is folded next; None if that is unknown."""
        self.examples: dict[str, torch.Tensor | SparseTensor] = {}
        """Inputs as the program is compiled with, by name."""
        self.dropped: dict[str, tuple[View, Condition, float]] = {}
        """By tensor: what a mask left of which tensor, and what it filled with."""
        self.unbroken: set[tuple[str, int]] = set()
        """Masks (tensor, dimension) that are taken to have no fiber without an entry, as in the examples."""

    def input(self, name: str, shape: tuple[int, ...], declared: Declared) -> View:
        """A tensor from outside."""
        self.inputs[name] = declared
        self.shapes[name] = shape
        self.taken.add(name)
        if all(size != 1 for size in shape):
            return View(name, tuple(range(len(shape))), shape)
        return self.squeezed(name)

    def constant(self, name: str, tensor: SparseTensor) -> View:
        """A tensor whose values are known; its levels may be stored in any order."""
        self.constants[name] = tensor
        return self.input(name, tensor.shape, declare(tensor, free=True))

    def known(self, tensor: torch.Tensor, suffix: str) -> View:
        """A tensor of numbers that is known, dense."""
        name = self.fresh(self.at + suffix)
        return self.constant(name, from_torch(name, tensor.to(torch.float64)))

    def fresh(self, name: str) -> str:
        """``name``, or with a number behind it if that is taken."""
        made, n = name, 1
        while made in self.taken:
            made, n = f"{name}_{n}", n + 1
        return made

    def squeezed(self, name: str) -> View:
        """A tensor from outside that has dimensions of size 1, which the program leaves out."""
        shape = self.shapes[name]
        kept = tuple(size for size in shape if size != 1)
        return self.spread(self.move("reshape", [name], kept, (), f"{name}_squeezed"), shape)

    def is_outside(self, name: str) -> bool:
        """Whether a tensor comes from outside, as it is or moved: what it stores can be told apart from what it does
        not."""
        if name in self.inputs:
            return True
        step = next(s for s in self.steps if s.name == name)
        if not isinstance(step, Move) or step.kind in ("eager", "topk_values", "topk_places"):
            return False
        return step.kind in MASKS or all(self.is_outside(x) for x in step.operands)

    def compress(self, name: str) -> None:
        """A mask is true where it stores a value: what comes from outside then stores what is not zero."""
        declared = self.inputs.get(name)
        if declared is None:
            step = next(s for s in self.steps if s.name == name)
            assert isinstance(step, Move)
            for operand in step.operands if step.kind not in MASKS else ():
                self.compress(operand)
            return
        if declared.format is None or "dense" in declared.format.levels[-1:]:
            order = declared.format.order if declared.format else ()
            format = Format(("compressed",) * len(declared.shape), order)
            self.inputs[name] = Declared(declared.shape, format, (), declared.fill, declared.free)
        self.pruned.add(name)

    def truth(self, condition: Condition) -> View:
        """A condition as ones and zeros."""
        if condition.zeros:
            one = self.constants.get("one") or from_torch("one", torch.ones((), dtype=torch.float64))
            there = self.binary("mask", self.constant("one", one), condition.view, "_there")
            return there if condition.stored else self.unary("rsub", there, "_absent", 1.0)
        return self.unary("ne" if condition.stored else "eq", condition.view, "_truth", 0.0)

    def spread(self, tensor: str, shape: tuple[int, ...]) -> View:
        """A tensor without dimensions of size 1 as one of ``shape``, which may have some."""
        dims, at = [], 0
        for size in shape:
            dims.append(None if size == 1 else at)
            at += size != 1
        return View(tensor, tuple(dims), shape)

    def move(self, kind: str, operands: Sequence[str], shape: tuple[int, ...], args: tuple[int, ...], name: str) -> str:
        key = (kind, tuple(operands), shape, args)
        if key not in self._made:
            made = fresh_name(name, self.taken)
            self.steps.append(Move(made, kind, tuple(operands), shape, args, self.source))
            self.shapes[made] = shape
            self._made[key] = made
        return self._made[key]

    def eager(
        self, operator: str, operands: Sequence[tuple[View, torch.dtype]], shape: tuple[int, ...], function: Any
    ) -> View:
        """A tensor of ``shape`` that PyTorch makes of ``operands``, dense, between regions.

        Raises:
            SparseError: one of them has more than ``LARGEST`` elements.
        """
        if large := [s for s in (shape, *(view.shape for view, _ in operands)) if math.prod(s) > LARGEST]:
            where = f"{operator} ({self.source or 'no source line'})"
            raise SparseError(
                f"{where} needs its tensors dense, and one has the shape {large[0]}", "apply it to a part"
            )
        made = fresh_name(self.at, self.taken)
        kept = tuple(size for size in shape if size != 1)
        sees = tuple((OutputView(x.tensor, tuple(x.dims), tuple(x.shape)), dtype) for x, dtype in operands)
        step = Eager(operator, sees, function, self.source)
        tensors = tuple(view.tensor for view, _ in operands)
        self.steps.append(Move(made, "eager", tensors, kept, (), self.source, step))
        self.shapes[made] = kept
        return self.spread(made, shape)

    def statement(
        self,
        op: str,
        indices: Sequence[str],
        operands: Sequence[Access],
        sizes: dict[str, int],
        suffix: str = "",
        *,
        reduced: Sequence[str] = (),
        reduction: str = "add",
        scalar: float | None = None,
        fill: float = 0.0,
        group: str = "",
    ) -> str:
        """Add a statement; its result has the indices whose size is not 1."""
        kept = tuple(i for i in indices if sizes[i] != 1)
        name = fresh_name(self.at + suffix, self.taken)
        used = {i for a in operands for i in a.indices}
        gone = tuple(i for i in reduced if i in used)
        self.steps.append(
            Statement(name, kept, op, tuple(operands), gone, reduction, scalar, fill, group or self.at, self.source)
        )
        self.shapes[name] = tuple(sizes[i] for i in kept)
        return name

    def access(self, view: View, indices: Sequence[str]) -> Access:
        """A view read with an index a dimension."""
        found = sorted((dim, index) for dim, index in zip(view.dims, indices, strict=True) if dim is not None)
        if len(found) != len(self.shapes[view.tensor]):
            raise SparseError(f"{view.tensor!r} is read with too few indices", "report the model")
        return Access(view.tensor, tuple(index for _, index in found))

    # -- whole-tensor operations --------------------------------------------------------------------------------------

    def unary(self, op: str, x: View, suffix: str = "", scalar: float | None = None, group: str = "") -> View:
        """An operation on every element."""
        names = letters(len(x.shape))
        dense = tuple(size if dim is not None else 1 for dim, size in zip(x.dims, x.shape, strict=True))
        sizes = dict(zip(names, dense, strict=True))
        made = self.statement(op, names, [self.access(x, names)], sizes, suffix, scalar=scalar, group=group)
        dims = self.spread(made, dense).dims
        return View(made, dims, x.shape)

    def binary(self, op: str, x: View, y: View, suffix: str = "", fill: float = 0.0, group: str = "") -> View:
        """An operation on two tensors, broadcast as PyTorch does."""
        rank = max(len(x.shape), len(y.shape))
        names = letters(rank)
        sizes, shape = {}, []
        for n, index in enumerate(names):
            pair = [(v.shape[at], v.dims[at]) for v in (x, y) if (at := n - rank + len(v.shape)) >= 0]
            size = max(s for s, _ in pair) if all(s for s, _ in pair) else 0
            if any(s not in (1, size) for s, _ in pair):
                raise SparseError(f"{op} of shapes {x.shape} and {y.shape} ({self.source})", "give shapes that fit")
            shape.append(size)
            sizes[index] = size if any(dim is not None for _, dim in pair) else 1
        accesses = [self.access(v, names[rank - len(v.shape) :]) for v in (x, y)]
        made = self.statement(op, names, accesses, sizes, suffix, fill=fill, group=group)
        return View(made, self.spread(made, tuple(sizes[i] for i in names)).dims, tuple(shape))

    def divide(self, x: View, y: View, suffix: str = "") -> View:
        """``x / y``: 0 where ``x`` stores nothing only if ``y`` cannot be 0 there, since 0 over 0 is not a number."""
        above = self._signs.of(y.tensor, self.steps, self.constants) == ABOVE
        return self.binary("share" if above else "div", x, y, suffix)

    def reduce(
        self, x: View, dims: Sequence[int], keep: bool, reduction: str = "add", suffix: str = "", group: str = ""
    ) -> View:
        """Sum or maximum over dimensions."""
        rank = len(x.shape)
        gone = {d % rank for d in dims} if rank else set()
        if any(x.dims[d] is None and x.shape[d] > 1 for d in gone):
            x = self.materialise(x)
        names = letters(rank)
        dense = [size if dim is not None else 1 for dim, size in zip(x.dims, x.shape, strict=True)]
        sizes = dict(zip(names, dense, strict=True))
        reduced = [names[d] for d in sorted(gone)]
        left = [i for i in names if i not in reduced]
        made = self.statement(
            "copy", left, [self.access(x, names)], sizes, suffix, reduced=reduced, reduction=reduction, group=group
        )
        at = iter(range(rank))
        kept = [None if sizes[i] == 1 else next(at) for i in left]
        if not keep:
            return View(made, tuple(kept), tuple(x.shape[d] for d in range(rank) if d not in gone))
        rest = iter(kept)
        spread = tuple(None if d in gone else next(rest) for d in range(rank))
        return View(made, spread, tuple(1 if d in gone else x.shape[d] for d in range(rank)))

    def contract(
        self, terms: Sequence[Sequence[str]], views: Sequence[View], result: Sequence[str], suffix: str = ""
    ) -> View:
        """An einsum; several operands are contracted from the left, each with a statement of its own."""
        sizes: dict[str, int] = {}
        real: dict[str, int] = {}
        for term, view in zip(terms, views, strict=True):
            for index, dim, size in zip(term, view.dims, view.shape, strict=True):
                real[index] = real.get(index, 1) if size == 1 else size
                sizes[index] = sizes.get(index, 1) if size == 1 or dim is None else size
        scale = math.prod(real[i] for i in real if i not in result and sizes[i] == 1)
        view, term = views[0], list(terms[0])
        if len(views) == 1:
            gone = [i for i in term if i not in result]
            kept = list(result)
            made = self.statement("copy", kept, [self.access(view, term)], sizes, suffix, reduced=gone)
            view, term = View(made, self._dims(kept, sizes), tuple(real[i] for i in kept)), kept
        for n in range(1, len(views)):
            last = n == len(views) - 1
            both = list(dict.fromkeys((*term, *terms[n])))
            later = {i for t in terms[n + 1 :] for i in t} | set(result)
            kept = list(result) if last else [i for i in both if i in later]
            gone = [i for i in both if i not in kept]
            accesses = [self.access(view, term), self.access(views[n], terms[n])]
            name = suffix if last else f"{suffix}_{n}"
            made = self.statement("mul", kept, accesses, sizes, name, reduced=gone)
            view, term = View(made, self._dims(kept, sizes), tuple(real[i] for i in kept)), kept
        return self.unary("mul", view, f"{suffix}_scaled", float(scale)) if scale > 1 else view

    @staticmethod
    def _dims(indices: Sequence[str], sizes: dict[str, int]) -> tuple[int | None, ...]:
        at = iter(range(len(indices)))
        return tuple(None if sizes[i] == 1 else next(at) for i in indices)

    def materialise(self, x: View) -> View:
        """The view as a tensor of its own, every expanded dimension filled and dimensions in the view's order."""
        names = letters(len(x.shape))
        sizes = dict(zip(names, x.shape, strict=True))
        made = self.statement("copy", names, [self.access(x, names)], sizes, "_expanded")
        return self.spread(made, x.shape)

    def reshape(self, x: View, shape: tuple[int, ...]) -> View:
        """Another shape with the same elements: free where only sizes 1 come or go, else data movement."""
        if [s for s in x.shape if s != 1] == [s for s in shape if s != 1]:
            dims = iter([dim for dim, size in zip(x.dims, x.shape, strict=True) if size != 1])
            return View(x.tensor, tuple(None if size == 1 else next(dims) for size in shape), shape)
        tensor = self.plain(x)
        return self.spread(self.move("reshape", [tensor], tuple(s for s in shape if s != 1), (), self.at), shape)

    def plain(self, x: View) -> str:
        """A tensor that holds the view with its dimensions in order (those of size 1 left out)."""
        if any(dim is None and size != 1 for dim, size in zip(x.dims, x.shape, strict=True)):
            x = self.materialise(x)
        dims = tuple(dim for dim in x.dims if dim is not None)
        if dims == tuple(range(len(dims))):
            return x.tensor
        shape = tuple(self.shapes[x.tensor][dim] for dim in dims)
        return self.move("permute", [x.tensor], shape, dims, f"{self.at}_permuted")

    def slice(self, x: View, dim: int, start: int, stop: int, step: int = 1) -> View:
        """Every ``step``-th of ``start:stop`` along a dimension."""
        size = len(range(start, stop, step))
        if size == x.shape[dim]:
            return x
        shape = tuple(size if d == dim else s for d, s in enumerate(x.shape))
        at = x.dims[dim]
        if at is None:
            return View(x.tensor, x.dims, shape)
        tensor = self.plain(x)
        at = sum(s != 1 for s in x.shape[:dim])
        full = tuple(size if d == at else s for d, s in enumerate(self.shapes[tensor]))
        made = self.move("slice", [tensor], full, (at, start, step), self.at)
        if size == 1:
            made = self.move("reshape", [made], tuple(s for s in full if s != 1), (), self.at)
        return self.spread(made, shape)

    def cat(self, parts: Sequence[View], dim: int) -> View:
        """Tensors one after the other along a dimension."""
        parts = [part for part in parts if part.shape[dim]] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        shape = tuple(sum(p.shape[d] for p in parts) if d == dim else size for d, size in enumerate(parts[0].shape))
        names = []
        for part in parts:
            tensor = self.plain(part)
            if part.shape[dim] == 1:  # the dimension has to be there to be joined along
                full = tuple(s for d, s in enumerate(part.shape) if s != 1 or d == dim)
                tensor = self.move("reshape", [tensor], full, (), self.at)
            names.append(tensor)
        at = sum(s != 1 for s in parts[0].shape[:dim])
        return self.spread(self.move("cat", names, tuple(s for s in shape if s != 1), (at,), self.at), shape)

    def program(self, outputs: Sequence[str]) -> EinsumProgram:
        """What was recorded, without what no output needs."""
        wanted = set(outputs)
        kept: list[Statement | Move] = []
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted |= set(step.operands) if isinstance(step, Move) else {a.tensor for a in step.operands}
                kept.append(step)
        return EinsumProgram(dict(self.inputs), tuple(reversed(kept)), tuple(dict.fromkeys(outputs)), self.shapes)

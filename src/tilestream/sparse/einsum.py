"""The einsum program: statements over named indices, the form that both front ends make and fusion reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilestream.errors import SparseError
from tilestream.sparse.eager import Eager
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.graph import ALU_BINARY, ALU_UNARY

BINARY = (*ALU_BINARY, "mask")
"""``mask`` keeps the left operand where the right one stores a value; elsewhere is the statement's ``fill``."""

_LETTERS = "ijklmnopqrstuvwxyzabcdefgh"
_SIGNS = {"mul": " * ", "add": " + ", "sub": " - ", "div": " / ", "shift": " - ", "share": " / ", "mask": " where "}


@dataclass(frozen=True)
class Access:
    """A use of a tensor: ``A_ik``. A dimension of size 1 that is broadcast has no index here."""

    tensor: str
    indices: tuple[str, ...]

    def __str__(self) -> str:
        return subscript(self.tensor, self.indices)


@dataclass(frozen=True)
class Statement:
    """``name[indices] = reduction over reduced of op(operands)``.

    Attributes:
        op: one of ``BINARY``, a unary operation of the stream graph's ALU, or ``"copy"``.
        scalar: second operand of a unary ``add``, ``sub``, ``rsub``, ``mul``, ``div``, ``rdiv``, ``max``, ``min``.
        reduction: ``"add"`` or ``"max"``, over ``reduced``.
        fill: for ``mask``, the value where the mask stores nothing: 0 or minus infinity.
        group: the operator it belongs to; an unfused schedule makes one region of each.
        source: the user's line.
    """

    name: str
    indices: tuple[str, ...]
    op: str
    operands: tuple[Access, ...]
    reduced: tuple[str, ...] = ()
    reduction: str = "add"
    scalar: float | None = None
    fill: float = 0.0
    group: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.group or self.name)
        if self.op not in BINARY and self.op not in ALU_UNARY and self.op != "copy":
            raise SparseError(f"statement {self.name!r}: unknown operation {self.op!r}", f"use {', '.join(BINARY)} ...")
        if self.op == "mask" and self.reduced:
            raise SparseError(f"statement {self.name!r} reduces what it masks", "make two statements")
        used = {i for access in self.operands for i in access.indices}
        if missing := [i for i in self.reduced if i not in used]:
            raise SparseError(f"statement {self.name!r} reduces {missing[0]!r}, which no operand has", "drop it")
        if left := used - set(self.indices) - set(self.reduced):
            raise SparseError(f"statement {self.name!r}: {sorted(left)[0]!r} is neither kept nor reduced", "name it")

    def __str__(self) -> str:
        parts = [str(x) for x in self.operands]
        if len(parts) == 2:
            sign = _SIGNS.get(self.op)
            right = sign.join(parts) if sign else f"{self.op}({', '.join(parts)})"
        else:
            scalar = "" if self.scalar is None else f", {self.scalar:g}"
            right = parts[0] if self.op == "copy" else f"{self.op}({parts[0]}{scalar})"
        if self.reduced:
            right = f"{'sum' if self.reduction == 'add' else 'max'}_{','.join(self.reduced)} {right}"
        return f"{subscript(self.name, self.indices)} = {right}"


@dataclass(frozen=True)
class Declared:
    """A tensor that comes from outside. ``format`` None: dense, stored in whatever order a schedule wants.

    ``extents``: mean number of coordinates in a fiber of each level, where known; for the choice of an order.
    ``fill``: what is not stored stands for: 0, or minus infinity under a mask. ``free``: the order of its levels is the
    schedule's to choose.
    """

    shape: tuple[int, ...]
    format: Format | None = None
    extents: tuple[float, ...] = ()
    fill: float = 0.0
    free: bool = False


@dataclass(frozen=True)
class Move:
    """Data movement between regions that no stream does: reshape, slice, concatenation, a constant.

    ``kind`` and ``args``, plain numbers by kind: ``sparse.moves.perform``. ``eager``: what PyTorch runs, of kind
    ``"eager"``.
    """

    name: str
    kind: str
    operands: tuple[str, ...]
    shape: tuple[int, ...]
    args: tuple[int, ...] = ()
    source: str = ""
    eager: Eager | None = None

    def __str__(self) -> str:
        what = self.eager.operator if self.eager else self.kind
        said = ", by PyTorch, dense and not timed" if self.eager else ""
        return f"{self.name} = {what}({', '.join(self.operands)}) {list(self.shape)}{said}"


MASKS = ("topk", "whole", "bare", "both")
"""Moves that make masks: compressed, whatever they are made of."""


@dataclass(frozen=True)
class EinsumProgram:
    """Statements and moves in program order, each name assigned once. ``shapes`` has every tensor's."""

    inputs: Mapping[str, Declared]
    steps: tuple[Statement | Move, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def statements(self) -> tuple[Statement, ...]:
        return tuple(x for x in self.steps if isinstance(x, Statement))

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)


def subscript(name: str, indices: Sequence[str]) -> str:
    """``A_ik``; with a comma where an index has more than one letter."""
    if not indices:
        return name
    return f"{name}_{''.join(indices) if all(len(i) == 1 for i in indices) else ','.join(indices)}"


def fresh(base: str, used: set[str]) -> str:
    """``base`` if free, else a letter nobody uses, else ``base`` with a number."""
    if base not in used:
        return base
    for letter in _LETTERS:
        if letter not in used:
            return letter
    n = 1
    while f"{base}{n}" in used:
        n += 1
    return f"{base}{n}"


def letters(count: int) -> tuple[str, ...]:
    """The usual names of ``count`` indices: i, j, k, ..."""
    used: set[str] = set()
    for _ in range(count):
        used.add(fresh("i", used))
    return tuple(sorted(used, key=lambda x: (len(x), _LETTERS.find(x[0]), x)))


def parse(text: str, declared: Sequence[tuple[str, Declared]]) -> EinsumProgram:
    """The program of ``'ik,kj->ij'``; more than two operands are contracted from the left (a chain of matmuls).

    An index is reduced as soon as no later operand and not the result has it.

    Args:
        declared: name and declaration of each operand.

    Raises:
        SparseError: text that is no einsum, operands that do not fit it, or an index twice in one operand.
    """
    clean = text.replace(" ", "")
    if not re.fullmatch(r"[A-Za-z]*(,[A-Za-z]*)*->[A-Za-z]*", clean):
        raise SparseError(f"{text!r} is no einsum", "write operands and result, as in 'ik,kj->ij'")
    left, result = clean.split("->")
    terms = left.split(",")
    if len(terms) != len(declared):
        raise SparseError(f"{text!r} has {len(terms)} operands and {len(declared)} were given", "give one a term")
    sizes: dict[str, int] = {}
    for term, (name, tensor) in zip(terms, declared, strict=True):
        if len(term) != len(tensor.shape) or len(set(term)) != len(term):
            raise SparseError(
                f"{term!r} does not fit {name!r} of shape {tensor.shape}", "use one letter an index, each once"
            )
        for index, size in zip(term, tensor.shape, strict=True):
            if sizes.setdefault(index, size) != size:
                raise SparseError(f"index {index!r} is {sizes[index]} and {size}", "give operands that fit")
    if unknown := [i for i in result if i not in sizes] or [i for i in result if result.count(i) > 1]:
        raise SparseError(f"{unknown[0]!r} of the result is in no operand, or there twice", "use each index once")
    names = [name for name, _ in declared]
    statements: list[Statement] = []
    access = Access(names[0], tuple(terms[0]))
    taken = set(names)
    if len(terms) == 1:
        reduced = tuple(i for i in terms[0] if i not in result)
        statements.append(Statement(fresh_name("T", taken), tuple(result), "copy", (access,), reduced))
    for at in range(1, len(terms)):
        last = at == len(terms) - 1
        later = set(result).union(*terms[at + 1 :])
        both = list(dict.fromkeys((*access.indices, *terms[at])))
        kept = tuple(result) if last else tuple(i for i in both if i in later)
        reduced = tuple(i for i in both if i not in kept)
        name = fresh_name("T" if last else f"T{at - 1}", taken)
        right = Access(names[at], tuple(terms[at]))
        statements.append(Statement(name, kept, "mul", (access, right), reduced, source=text))
        access = Access(name, kept)
    shapes = {s.name: tuple(sizes[i] for i in s.indices) for s in statements}
    shapes |= {name: tensor.shape for name, tensor in declared}
    return EinsumProgram(dict(declared), tuple(statements), (statements[-1].name,), shapes)


def fresh_name(base: str, taken: set[str]) -> str:
    """``base`` or ``base`` with a number; what is returned is added to ``taken``."""
    name, n = base, 1
    while name in taken:
        name, n = f"{base}_{n}", n + 1
    taken.add(name)
    return name

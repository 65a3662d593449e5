"""Which statements become pipelines: those of a sparse matrix, and what follows them row by row.

A walk in program order. A statement that reads a sparse matrix opens a pipeline; what it reads at each entry (the
scores of an attention) is made inside of it, so that no dense matrix of rows by columns is. A statement that reads what
an open pipeline makes joins it where the kernel can do it. As soon as anything else reads of it, it is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from tilestream.errors import TilestreamError
from tilestream.kernels.families import why_no_kernel
from tilestream.sparse.cpu.distributing import distributed
from tilestream.sparse.cpu.fusing import reassociated
from tilestream.sparse.einsum import EinsumProgram, Move, Statement
from tilestream.sparse.pipelines.lowering import Lowered, Matrix, Unfit, lowered

DENSE, PRODUCT, TWO = "no operand is sparse", "a product of dense matrices", "it reads two sparse matrices"


@dataclass(frozen=True)
class Ragged:
    """Statements that are one pipeline."""

    statements: tuple[Statement, ...]
    lowered: Lowered


@dataclass(frozen=True)
class Library:
    """A statement or a move that PyTorch does, and why."""

    step: Statement | Move
    why: str


Piece = Ragged | Library


@dataclass
class _Open:
    matrix: str
    members: list[Statement] = field(default_factory=list)


def placed(program: EinsumProgram, dtype: str) -> tuple[EinsumProgram, tuple[Piece, ...]]:
    """The program with products turned where that takes fewer operations, and its pieces in an order in which they run.

    A sparse matrix that no pipeline reads counts as dense, which is said of the statements that read it.
    """
    refused: dict[str, str] = {}
    while True:
        turned, _ = reassociated(distributed(_with_dense(program, refused)))
        walk = _Walk(turned, dtype)
        pieces = walk.pieces()
        used = {p.lowered.matrix.name for p in pieces if isinstance(p, Ragged)}
        more = {name: why for name, why in walk.refused.items() if name not in used and name not in refused}
        if not more:
            break
        refused |= more
    return turned, tuple(replace(p, why=_why(p, refused)) if isinstance(p, Library) else p for p in pieces)


def _why(piece: Library, refused: Mapping[str, str]) -> str:
    reads = [a if isinstance(a, str) else a.tensor for a in piece.step.operands]
    return next((refused[name] for name in reads if name in refused), piece.why)


def _with_dense(program: EinsumProgram, names: Iterable[str]) -> EinsumProgram:
    inputs = {n: replace(d, format=None, extents=()) if n in names else d for n, d in program.inputs.items()}
    return replace(program, inputs=inputs)


def sparse_matrices(program: EinsumProgram) -> frozenset[str]:
    """Inputs of two dimensions with a compressed level, and what moves make of them alone."""
    found = {
        n for n, d in program.inputs.items()
        if d.format is not None and "compressed" in d.format.levels and len(d.shape) == 2 and not d.fill
    }  # fmt: skip
    kept = set(found)
    for step in program.steps:
        if isinstance(step, Move) and step.kind == "permute" and set(step.operands) <= kept:
            kept.add(step.name)
    return frozenset(kept)


class _Walk:
    def __init__(self, program: EinsumProgram, dtype: str) -> None:
        self.program, self.dtype = program, dtype
        self.sparse = sparse_matrices(program)
        self.makers = {s.name: s for s in program.statements}
        self.place = {step.name: n for n, step in enumerate(program.steps)}
        reads = [a if isinstance(a, str) else a.tensor for step in program.steps for a in step.operands]
        self.uses = Counter((*reads, *program.outputs))
        self.open: list[_Open] = []
        self.made: list[Piece] = []
        self.refused: dict[str, str] = {}
        """Sparse matrices that a statement could not read in a pipeline, and why."""

    def pieces(self) -> list[Piece]:
        chains = {s.name: self._chain(s) for s in self.program.statements}
        inside = {one.name for chain in chains.values() for one in chain}
        for step in self.program.steps:
            if isinstance(step, Move):
                self._library(step, "data movement")
            elif step.name not in inside:
                self._take(step, [*chains[step.name], step])
        for piece in list(self.open):
            self._close(piece)
        return self.made

    def _chain(self, s: Statement) -> list[Statement]:
        """What a statement reads at each entry of its sparse matrix, if nothing else reads it, in program order."""
        matrix = next((a for a in s.operands if a.tensor in self.sparse), None)
        if matrix is None or s.op not in ("mul", "mask"):
            return []
        found: list[Statement] = []
        left = [(a, set(matrix.indices)) for a in s.operands if a is not matrix]
        while left:
            access, pair = left.pop()
            maker = self.makers.get(access.tensor)
            if maker is None or not pair <= set(access.indices) or self.uses[maker.name] != 1:
                continue
            if any(a.tensor in self.sparse for a in maker.operands):
                continue
            inner = {own for own, i in zip(maker.indices, access.indices, strict=True) if i in pair}
            found.append(maker)
            left += [(a, inner) for a in maker.operands]
        return self._sorted(found)

    def _sorted(self, statements: Iterable[Statement]) -> list[Statement]:
        return sorted(statements, key=lambda s: self.place[s.name])

    # -- steps

    def _take(self, step: Statement, group: list[Statement]) -> None:
        own = {s.name for s in group}
        reads = {a.tensor for s in group for a in s.operands} - own
        matrices = {name for name in reads if name in self.sparse}
        from_open = [p for p in self.open if reads & {s.name for s in p.members}]
        known = {*matrices, *(p.matrix for p in from_open)}
        if len(known) == 1 and (from_open or matrices):
            joined = _Open(next(iter(known)), self._sorted([*(s for p in from_open for s in p.members), *group]))
            why = self._why_not(joined)
            if not why:
                self.open = [p for p in self.open if p not in from_open] + [joined]
                self._pull(joined)
                return
        else:
            why = TWO if known else DENSE
        self._close_all(reads)
        if len(matrices) == 1 and from_open:
            alone = _Open(next(iter(matrices)), group)
            why = self._why_not(alone)
            if not why:
                self.open.append(alone)
                self._pull(alone)
                return
        for one in group:
            product = one.op == "mul" and one.reduced and not matrices
            self._library(one, PRODUCT if product else why if matrices or from_open else DENSE)
        if len(matrices) == 2:
            why = TWO
            matrices = {max(sorted(matrices), key=self._share)}
        self.refused |= dict.fromkeys(matrices, why)

    def _pull(self, piece: _Open) -> None:
        """Take in what works element by element on what rows have, and only the pipeline reads."""
        reads = {a.tensor for s in piece.members for a in s.operands}
        for made in list(self.made):
            one = made.step if isinstance(made, Library) else None
            if not isinstance(one, Statement) or one.reduced or self.uses[one.name] != 1 or one.name not in reads:
                continue
            if any(a.tensor in self.sparse for a in one.operands):
                continue
            more = _Open(piece.matrix, self._sorted([*piece.members, one]))
            found = self._lowered(more, partial=True)
            if isinstance(found, Lowered) and one.name not in found.of_edges:
                piece.members = more.members
                self.made.remove(made)
                return self._pull(piece)
        return None

    def _share(self, name: str) -> float:
        """How much of a matrix is stored: of two that one statement reads, the fuller one is made dense."""
        declared = self.program.inputs.get(name)
        return prod(declared.extents or declared.shape) / max(1, prod(declared.shape)) if declared else 0.0

    def _library(self, step: Statement | Move, why: str) -> None:
        self._close_all({a if isinstance(a, str) else a.tensor for a in step.operands})
        self.made.append(Library(step, why))

    def _close_all(self, reads: set[str]) -> None:
        for piece in list(self.open):
            if reads & {s.name for s in piece.members}:
                self._close(piece)

    def _close(self, piece: _Open) -> None:
        """Put an open pipeline behind what was made so far; where others read what an entry has, PyTorch makes it."""
        self.open.remove(piece)
        found = self._lowered(piece)
        if isinstance(found, Lowered):
            self.made.append(Ragged(tuple(piece.members), found))
            return
        self.made += [Library(s, found) for s in piece.members]
        self.refused[piece.matrix] = found

    def _read_outside(self, piece: _Open) -> frozenset[str]:
        own = {s.name for s in piece.members}
        inside = dict.fromkeys(own, 0)
        for s in piece.members:
            for a in s.operands:
                if a.tensor in own:
                    inside[a.tensor] += 1
        return frozenset(name for name in own if self.uses[name] > inside[name])

    def _why_not(self, piece: _Open) -> str:
        """Why statements are no pipeline as far as is known: what they will be read for is not looked at."""
        found = self._lowered(piece, partial=True)
        return "" if isinstance(found, Lowered) else found

    def _lowered(self, piece: _Open, partial: bool = False) -> Lowered | str:
        """With the rows of either dimension; in words, why there is none."""
        read = self._read_outside(piece)
        reasons: list[str] = []
        for rows in (0, 1):
            try:
                made = lowered(self.program, piece.members, Matrix(piece.matrix, rows), read, self.dtype, partial)
                reason = why_no_kernel(made.pipeline) if made.results else ""
            except Unfit as unfit:
                reason = unfit.reason
            except TilestreamError as error:
                reason = error.cause
            else:
                if not reason:
                    return made
            reasons.append(reason)
        return reasons[0]

"""A sparse program on a GPU or on the reference machine: pipelines, and what PyTorch does between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from tilestream import cuda
from tilestream.errors import DeviceError, OptionError, SparseError
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.lengths import Lengths
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.run import timing
from tilestream.run.device_ops import segments
from tilestream.run.executable import Enqueue, build_ahead, executable
from tilestream.sparse.cpu.held import flat
from tilestream.sparse.einsum import Move, Statement
from tilestream.sparse.moves import perform
from tilestream.sparse.outputs import spread
from tilestream.sparse.pipelines.attention import attention
from tilestream.sparse.pipelines.library import STORED, function
from tilestream.sparse.pipelines.lowering import Lowered, Matrix
from tilestream.sparse.pipelines.placing import Library, Ragged, placed, sparse_matrices
from tilestream.sparse.program import Program, Value
from tilestream.sparse.storage import SparseTensor, to_coo

TARGETS = ("cuda", "reference")
MOST, MOST_BESIDE = 1 << 30, 1 << 27
"""Elements of a sparse tensor that PyTorch reads as a dense one, at most (beyond, it has a sparse product alone); and
where a pipeline reads it as well."""

Have = dict[str, torch.Tensor]


def parse_dtype(text: str) -> torch.dtype:
    """
    Raises:
        OptionError: it is none of those that pipelines know.
    """
    known = {str(d).removeprefix("torch."): d for d in DTYPES}
    if text not in known:
        raise OptionError(f"--dtype is {text!r}", f"use {', '.join(known)}")
    return known[text]


@dataclass(frozen=True)
class Rows:
    """Where a matrix's entries are, by rows, as pipelines read it: int32 tensors, and what it stores."""

    starts: torch.Tensor
    busy: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    @cached_property
    def lengths(self) -> Lengths:
        return Lengths.of(torch.diff(self.starts.cpu()).tolist())

    @property
    def sizes(self) -> dict[str, int]:
        return {"nodes": len(self.starts) - 1, "edges": len(self.columns)}


def by_rows(tensor: SparseTensor, matrix: Matrix, device: torch.device, dtype: torch.dtype) -> Rows:
    """A stored matrix with the rows of one of its dimensions, columns in ascending order."""
    coordinates, values = to_coo(tensor)
    rows, columns = coordinates[:, matrix.rows], coordinates[:, 1 - matrix.rows]
    order = np.lexsort((columns, rows))
    index = torch.from_numpy(rows[order]).to(device)
    _, starts, busy = segments(index, tensor.shape[matrix.rows])
    at = torch.from_numpy(columns[order].astype(np.int32)).to(device)
    return Rows(starts, busy, at, torch.from_numpy(values[order]).to(device, dtype))


@dataclass(frozen=True)
class Step:
    """What runs at once: ``run`` reads tensors by name and adds what it makes.

    Attributes:
        statements: what it does of the program.
        lowered, rows: of a pipeline.
        why: of what PyTorch does, by statement, why.
        other_us: what the other of a pipeline and PyTorch's operators takes, where both were timed.
    """

    name: str
    statements: tuple[Statement | Move, ...]
    run: Callable[[Have], None]
    lowered: Lowered | None = None
    rows: Rows | None = None
    why: tuple[str, ...] = ()
    other_us: float | None = None


class PipelineProgram:
    """A program whose statements over sparse matrices are ragged pipelines, and all others PyTorch's operators.

    Args:
        program: as ``compile`` makes it; its schedule, which is for streams, means nothing here.
        target: ``cuda``: kernels, and Inductor between them. ``reference``: the reference machine, on any CPU.
        dtype: of what lies in memory: float32, bfloat16 or float16. Pipelines compute in fp32.
        choose: on a GPU, time PyTorch's operators on dense tensors in the place of each pipeline, and keep what is
            faster.

    Raises:
        DeviceError: ``cuda`` without a GPU that runs our kernels.
        SparseError: another target or dtype, or values in blocks.
    """

    def __init__(
        self, program: Program, target: str = "cuda", dtype: torch.dtype = torch.float32, choose: bool = True
    ) -> None:
        if target not in TARGETS:
            raise SparseError(f"target {target!r}", f"use {' or '.join(TARGETS)}")
        if dtype not in DTYPES:
            raise SparseError(f"a program in {dtype}", f"use {', '.join(str(d) for d in DTYPES)}")
        if target == "cuda" and (why := cuda.available()):
            raise DeviceError(f"target 'cuda' cannot be used: {why}", "use --target reference, or cpu for loops")
        if program.asked.block > 1 or any(d.format and d.format.block > 1 for d in program.einsums.inputs.values()):
            raise SparseError("a program in blocks", "use block=1 for pipelines")
        self.program, self.target, self.dtype, self.choose = program, target, dtype, choose and target == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if target == "cuda" else torch.device("cpu")
        self.einsums, self.pieces = placed(program.einsums, DTYPES[dtype])
        build_ahead([p.lowered.pipeline for p in self.pieces if isinstance(p, Ragged)], target)

    def run(self, *inputs: Value) -> tuple[torch.Tensor, ...]:
        """The outputs of a call, float64 and on the CPU; inputs as ``Program.run`` takes them."""
        return tuple(x.double().cpu() for x in self.bind(*inputs)())

    def bind(self, *inputs: Value) -> BoundProgram:
        """The program on these inputs: sorted, packed and on the device.

        Raises:
            SparseError: inputs that are not those of the program, a sparse tensor too large to be dense where PyTorch
                reads it, or a statement that it has no operator for.
        """
        return BoundProgram(self, self.program.bind(*inputs))


class BoundProgram:
    """A program on inputs that stay; ``steps`` in order. Calling it enqueues all of them: outputs on the device."""

    def __init__(self, of: PipelineProgram, given: Mapping[str, SparseTensor]) -> None:
        self.of, self._given = of, dict(given)
        self._rows: dict[Matrix, Rows] = {}
        self._times: dict[tuple[Pipeline, Matrix], list[float]] = {}
        self.inputs: Have = {}
        self._kept = self._needed()
        self.steps = tuple(self._steps())

    def __call__(self) -> tuple[torch.Tensor, ...]:
        have = self.execute()
        return tuple(spread(view, have[view.tensor]) for view in self.of.program.outputs)

    def execute(self) -> Have:
        """All tensors by name, after a run."""
        have = dict(self.inputs)
        for step in self.steps:
            step.run(have)
        return have

    def times_us(self) -> tuple[float, dict[str, float]]:
        """Microseconds of a run and of each step by itself: CUDA graphs, in turn, medians."""
        have = self.execute()
        calls = [self.execute, *(partial(step.run, dict(have)) for step in self.steps)]
        whole, *each = timing.timed_side_by_side(calls)
        return whole, dict(zip((step.name for step in self.steps), each, strict=True))

    # -- steps

    def _needed(self) -> list[set[str]]:
        """Behind each piece, the names that are read there or later."""
        later = {view.tensor for view in self.of.program.outputs}
        found: list[set[str]] = []
        for piece in reversed(self.of.pieces):
            found.append(later)
            later = later | _reads(piece)
        return found[::-1]

    def _steps(self) -> list[Step]:
        made: list[Step] = []
        together: list[Library] = []
        shared = sparse_matrices(self.of.einsums)
        for at, piece in enumerate(self.of.pieces):
            if isinstance(piece, Ragged):
                made += self._library(together, self._kept[at - 1] | _reads(piece), len(made))
                made.append(self._ragged(piece, len(made)))
                if self.of.choose:
                    made[-1] = self._faster(made, self._kept[at])
                together = []
            elif isinstance(piece.step, Move) and piece.step.name in shared:
                sparse = perform(piece.step, [self._given[n] for n in piece.step.operands])
                self._given[piece.step.name] = sparse
            else:
                together.append(piece)
        return made + self._library(together, self._kept[-1] if self._kept else set(), len(made))

    def _library(self, pieces: Sequence[Library], later: set[str], number: int) -> list[Step]:
        """Neighbouring statements of PyTorch's: compiled as one, but for operators that are only called."""
        made: list[Step] = []
        run: list[Library] = []
        for at, piece in enumerate(pieces):
            called = self._eager(piece.step) if isinstance(piece.step, Move) else self._large(piece.step)
            if called is not None:
                rest = later.union(*map(_reads, pieces[at:]))
                made += self._function(run, rest, number + len(made))
                made.append(Step(f"PyTorch {number + len(made)}", (piece.step,), called, why=(piece.why,)))
                run = []
            else:
                run.append(piece)
        return made + self._function(run, later, number + len(made))

    def _function(self, pieces: Sequence[Library], later: set[str], number: int) -> list[Step]:
        if not pieces:
            return []
        steps = tuple(p.step for p in pieces)
        own = {s.name for s in steps}
        reads = list(dict.fromkeys(n for p in pieces for n in _operands(p.step) if n.removesuffix(STORED) not in own))
        makes = [s.name for s in steps if s.name in later]
        for name in reads:
            self._dense(name)
        compiled = self.of.target == "cuda"
        call = function(steps, reads, makes, self.of.dtype, compiled)

        def run(have: Have) -> None:
            have.update(zip(makes, call(*[have[n] for n in reads]), strict=True))

        return [Step(f"PyTorch {number}", steps, run, why=tuple(p.why for p in pieces))]

    def _faster(self, steps: Sequence[Step], later: set[str]) -> Step:
        """The last of some steps, or PyTorch's operators in its place; both are timed on what those before it make."""
        mine = steps[-1]
        low, rows = mine.lowered, mine.rows
        assert low is not None and rows is not None
        other = self._dense_step(mine, later)
        if other is None:
            return mine
        key = (low.pipeline, low.matrix)
        if key not in self._times:
            have = dict(self.inputs)
            for step in steps[:-1]:
                step.run(have)
            arms = [timing.capture(partial(step.run, dict(have))) for step in (mine, other)]
            self._times[key] = [statistics.median(found) for found in timing.to_choose(arms)]
        own, dense = self._times[key]
        if own <= dense:
            return replace(mine, other_us=dense)
        why = f"{dense:.1f} us, its pipeline {own:.1f}"
        return replace(other, why=(why,) * len(mine.statements), other_us=own)

    def _dense_step(self, step: Step, later: set[str]) -> Step | None:
        """A pipeline's statements by PyTorch; None where a dense matrix would be too large."""
        statements = tuple(s for s in step.statements if isinstance(s, Statement))
        assert step.lowered is not None
        name = step.lowered.matrix.name
        if self._is_larger(name, MOST_BESIDE):
            return None
        found = attention(statements)
        if found is None:
            (made,) = self._function([Library(s, "") for s in statements], later, int(step.name.split()[-1]))
            return made
        self._dense(name + STORED)
        call = found.call(self.inputs[name + STORED])
        reads = [found.q[0], found.k[0], found.v[0]]
        for one in reads:
            self._dense(one)

        def run(have: Have) -> None:
            (have[found.result],) = call(*[have[n] for n in reads])

        return Step(f"PyTorch {step.name.split()[-1]}", statements, run)

    def _large(self, s: Statement) -> Callable[[Have], None] | None:
        """A product of a sparse matrix too large to be dense and a dense one, by PyTorch's sparse product."""
        large = [a for a in s.operands if self._is_larger(a.tensor, MOST)]
        plain = s.op == "mul" and len(s.reduced) == 1 and len(s.operands) == 2 and s.reduction == "add"
        if len(large) != 1 or not plain or any(len(a.indices) != 2 for a in s.operands):
            return None
        (sparse,), (x,) = large, [a for a in s.operands if a is not large[0]]
        matrix, shape = Matrix(sparse.tensor, 1 - sparse.indices.index(s.reduced[0])), self._given[sparse.tensor].shape
        rows = self._by_rows(matrix)
        size = (shape[matrix.rows], shape[1 - matrix.rows])
        csr = torch.sparse_csr_tensor(rows.starts, rows.columns, rows.values, size, check_invariants=False)
        self._dense(x.tensor)
        turned, back = x.indices[0] != s.reduced[0], s.indices[0] != sparse.indices[matrix.rows]

        def run(have: Have) -> None:
            made = csr @ (have[x.tensor].t() if turned else have[x.tensor])
            have[s.name] = made.t() if back else made

        return run

    def _is_larger(self, name: str, most: int) -> bool:
        """Whether an input is sparse, and would have more elements as a dense tensor."""
        tensor = self._given.get(name)
        return tensor is not None and "compressed" in tensor.format.levels and math.prod(tensor.shape) > most

    def _eager(self, move: Move) -> Callable[[Have], None] | None:
        if move.eager is None:
            return None
        eager = move.eager
        for name in move.operands:
            self._dense(name)

        def run(have: Have) -> None:
            operands = [
                spread(view, have[n]).to(self.of.dtype if kind.is_floating_point else kind)
                for n, (view, kind) in zip(move.operands, eager.operands, strict=True)
            ]
            have[move.name] = eager.function(*operands).to(self.of.dtype).reshape(move.shape)

        return run

    def _ragged(self, piece: Ragged, number: int) -> Step:
        low = piece.lowered
        rows = self._by_rows(low.matrix)
        given = {"starts": rows.starts, "starts.busy": rows.busy, "columns": rows.columns, "values": rows.values}
        given = {t.name: given[t.name] for t in low.pipeline.tensors if t.name in given}
        new: list[str] = []
        for bound in low.reads:
            self._dense(bound.tensor)
            if bound.tensor in self.inputs:
                given[bound.name] = _laid(self.inputs[bound.tensor], bound.dims)
            else:
                new.append(bound.name)
        written = [*new, *(b.name for b in low.results)]
        nodes = rows.sizes["nodes"]
        enqueue: Enqueue = executable(low.pipeline, self.of.target, self.of.device).bind(given, nodes, written)
        results = {t.name: (nodes, *(a.size or 1 for a in t.axes[1:])) for t in low.pipeline.by_role(Role.OUTPUT)}

        def run(have: Have, held: Have = given) -> None:  # kernels know addresses alone: what lies there must stay
            read = [_laid(have[b.tensor], b.dims) for b in low.reads if b.name in new]
            made = [torch.empty(results[b.name], dtype=self.of.dtype, device=self.of.device) for b in low.results]
            enqueue([*read, *made])
            for bound, x in zip(low.results, made, strict=True):
                have[bound.tensor] = x.permute([bound.dims.index(d) for d in range(x.dim())])

        return Step(f"pipeline {number}", piece.statements, run, low, rows)

    # -- inputs

    def _by_rows(self, matrix: Matrix) -> Rows:
        if matrix not in self._rows:
            self._rows[matrix] = by_rows(self._given[matrix.name], matrix, self.of.device, self.of.dtype)
        return self._rows[matrix]

    def _dense(self, name: str) -> None:
        """Have an input as a dense tensor on the device, or where it stores something; others are made by steps."""
        source = name.removesuffix(STORED)
        if name in self.inputs or source not in self._given:
            return
        tensor = self._given[source]
        if self._is_larger(source, MOST):
            shape = " x ".join(f"{n:,}" for n in tensor.shape)
            raise SparseError(
                f"PyTorch would read {source!r} ({shape}) as a dense tensor", "use --target cpu, which keeps it sparse"
            )
        if name == source:
            self.inputs[name] = flat(tensor, torch.float64).to(self.of.device, self.of.dtype)
        else:
            stored = torch.zeros(tensor.shape, dtype=torch.bool)
            stored[tuple(torch.from_numpy(to_coo(tensor)[0].T))] = True
            self.inputs[name] = stored.to(self.of.device)


def _laid(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A tensor with its dimensions in another order, in memory as kernels read it."""
    made = x.permute(dims).contiguous()
    return made.clone() if made.data_ptr() % 16 else made


def _operands(step: Statement | Move) -> list[str]:
    """Names of the dense tensors that a step reads; of a mask where it stores something."""
    if isinstance(step, Move):
        return list(step.operands)
    masks = step.op == "mask"
    return [a.tensor + STORED if masks and n else a.tensor for n, a in enumerate(step.operands)]


def _reads(piece: Ragged | Library) -> set[str]:
    if isinstance(piece, Library):
        return {n.removesuffix(STORED) for n in _operands(piece.step)}
    return {b.tensor for b in piece.lowered.reads}

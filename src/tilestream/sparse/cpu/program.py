"""A compiled program on the CPU: every region a function of loops, compiled by numba, with arrays between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numba import njit

from tilestream.errors import SparseError
from tilestream.sparse.cpu.functions import exp
from tilestream.sparse.cpu.interpreted import INTERPRETED, divided, quietly
from tilestream.sparse.cpu.kernels import product, sum_rows
from tilestream.sparse.cpu.nests import Nests
from tilestream.sparse.einsum import MASKS, Move
from tilestream.sparse.engine.kernels.arithmetic import rounded
from tilestream.sparse.moves import perform
from tilestream.sparse.program import Program, Value, dense_output
from tilestream.sparse.region import Region
from tilestream.sparse.storage import Format, Level, SparseTensor, to_coo

MOST = 1 << 29
"""Elements of a result, which is a dense array here."""

Held = SparseTensor | np.ndarray


@dataclass(frozen=True)
class CpuResult:
    """``outputs``: float64 tensors. ``seconds`` of the calling thread's processor time, of all and by region and move,
    without what compiling and putting the inputs into their formats took."""

    outputs: tuple[torch.Tensor, ...]
    seconds: float
    regions: Mapping[str, float] = field(repr=False)

    @property
    def output(self) -> torch.Tensor:
        """The only output; the first of several."""
        return self.outputs[0]


@dataclass(frozen=True)
class _Compiled:
    """``function`` of the arrays ``arguments`` (tensor, array), the results, and ``sizes``."""

    function: Callable[..., None]
    arguments: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    source: str


class CpuProgram:
    """The regions of a program as loops. Compiled once; ``run`` may be called with other values of the same shapes.

    Results between regions are dense arrays; a result that would have more than ``MOST`` elements is refused. Lanes of
    a schedule mean nothing here: everything runs on one core, in the calling thread. ``compiled`` False leaves the
    loops to Python.

    Raises:
        SparseError: a schedule in blocks, a result that is too large, or an order that loops cannot have.
    """

    def __init__(self, program: Program, compiled: bool = True) -> None:
        self.program, self.compiled = program, compiled
        made = {name for step in program.steps for name in ([step.name] if isinstance(step, Move) else step.outputs)}
        self._arrays = {
            name for name in {*made, *program.einsums.inputs} if name in made and not _stays_sparse(program, name)
        }
        self._arrays |= {n for n, d in program.einsums.inputs.items() if d.format is None}
        self.regions = {r.name: self._compile(r) for r in program.regions}

    @property
    def source(self) -> str:
        """The generated code."""
        return "\n\n\n".join(f"# {name}\n{one.source}" for name, one in self.regions.items())

    def run(self, *inputs: Value) -> CpuResult:
        """Run every region, one after the other; inputs as ``Program.run`` takes them."""
        have: dict[str, Held] = {}
        for name, tensor in self.program.bind(*inputs).items():
            have[name] = _flat(tensor) if name in self._arrays else tensor
        ready = {r.name: self._bound(r, have) for r in self.program.regions}
        seconds: dict[str, float] = {}
        shapes = self.program.einsums.shapes
        for step in self.program.steps:
            began = time.thread_time()
            if isinstance(step, Move):
                have[step.name] = self._moved(step, have)
            else:
                compiled = self.regions[step.name]
                results = {name: np.empty(max(1, math.prod(shapes[name]))) for name in step.outputs}
                known = ready[step.name]
                given = [known[x] if x in known else self._array(step, x, have) for x in compiled.arguments]
                compiled.function(*given, *results.values(), *compiled.sizes)
                have |= results
            seconds[step.name] = time.thread_time() - began
        outputs = tuple(self._output(view, have) for view in self.program.outputs)
        return CpuResult(outputs, sum(seconds.values()), seconds)

    def _compile(self, region: Region) -> _Compiled:
        shapes = self.program.einsums.shapes
        if large := [n for n in region.outputs if math.prod(shapes[n]) > MOST]:
            raise SparseError(
                f"result {large[0]!r} of shape {shapes[large[0]]} as a dense array", "fuse what makes and what reads it"
            )
        nests = Nests(region, self._arrays, self.program.einsums.inputs)
        text = nests.source()
        space: dict[str, Any] = {"np": np, "math": math, "exp": exp, "rounded": rounded, "find": _find}
        space |= {"product": product, "sum_rows": sum_rows}
        if not self.compiled:
            space |= INTERPRETED
        exec(compile(text if self.compiled else divided(text), f"<{region.name}>", "exec"), space)
        function = space["region"] if self.compiled else quietly(space["region"])
        if self.compiled:
            function = njit(error_model="numpy", fastmath={"contract", "reassoc"}, nogil=True)(function)
        sizes = tuple(nests.fused.sizes[index] for index in nests.sizes)
        return _Compiled(function, tuple(nests.arguments), sizes, text)

    def _bound(self, region: Region, have: Mapping[str, Held]) -> dict[tuple[str, str], np.ndarray]:
        """The arrays of what is there before anything runs, stored as the region reads them."""
        found = {}
        for argument in self.regions[region.name].arguments:
            if argument[0] in have or _view(region, argument[0])[0] in have:
                found[argument] = self._array(region, argument, have)
        return found

    def _array(self, region: Region, argument: tuple[str, str], have: Mapping[str, Held]) -> np.ndarray:
        tensor, array = argument
        if tensor in self._arrays:
            held = have[tensor]
            assert isinstance(held, np.ndarray)
            shape, order = self.program.einsums.shapes[tensor], [int(d) for d in array[6:].split(",") if d]
            if order == list(range(len(shape))):
                return held
            return np.ascontiguousarray(held[: math.prod(shape)].reshape(shape).transpose(order)).reshape(-1)
        source, form = _view(region, tensor)
        stored = self.program.view(tensor, source, form, {n: t for n, t in have.items() if isinstance(t, SparseTensor)})
        if array == "values":
            return stored.values
        level = stored.levels[int(array[3:])]
        found = level.seg if array.startswith("seg") else level.crd
        assert found is not None
        return found

    def _moved(self, move: Move, have: Mapping[str, Held]) -> Held:
        shapes = self.program.einsums.shapes
        operands = [have[x] for x in move.operands]
        if all(isinstance(x, np.ndarray) for x in operands) and move.kind in ("reshape", "permute", "slice", "cat"):
            sizes = [shapes[n] for n in move.operands]
            arrays = [np.asarray(x)[: math.prod(n)].reshape(n) for x, n in zip(operands, sizes, strict=True)]
            return np.ascontiguousarray(_shaped(move, arrays)).reshape(-1)
        made = perform(move, [_tensor(n, shapes[n], x) for n, x in zip(move.operands, operands, strict=True)])
        return _flat(made) if move.name in self._arrays else made

    def _output(self, view: Any, have: Mapping[str, Held]) -> torch.Tensor:
        held, shape = have[view.tensor], self.program.einsums.shapes[view.tensor]
        return dense_output(view, _tensor(view.tensor, shape, held), 0.0)


def _view(region: Region, name: str) -> tuple[str, Format]:
    """The tensor that a region reads by this name, and the view's format; of a plain array, the tensor itself."""
    found = [(leaf.tensor, form) for leaf, (view, form) in region.views.items() if name == view]
    found += [(leaf.tensor, form) for leaf, (_, form) in region.views.items() if name == leaf.tensor]
    if found:
        return found[0]
    raise SparseError(f"region {region.name!r} reads no {name!r}", "report the program")


@njit(error_model="numpy")
def _find(crd: np.ndarray, first: int, last: int, wanted: int) -> int:
    """Where a coordinate is in a fiber, or -1."""
    end = last
    while first < last:
        middle = (first + last) // 2
        if crd[middle] < wanted:
            first = middle + 1
        else:
            last = middle
    return first if first < end and crd[first] == wanted else -1


def _stays_sparse(program: Program, name: str) -> bool:
    """Whether a result is data movement of something sparse: an adjacency, a mask."""
    step = next((s for s in program.einsums.steps if s.name == name), None)
    if not isinstance(step, Move):
        return False
    if step.kind in (*MASKS, "adjacency"):
        return True
    inputs = program.einsums.inputs
    return all(
        (x in inputs and inputs[x].format is not None) or (x not in inputs and _stays_sparse(program, x))
        for x in step.operands
    )


def _flat(tensor: SparseTensor) -> np.ndarray:
    """Values as a flat dense array in the order of the tensor's dimensions."""
    if "compressed" not in tensor.format.levels and tensor.format.order == tuple(range(len(tensor.shape))):
        return tensor.values.reshape(-1) if tensor.values.size else np.zeros(1)
    made = np.zeros(tensor.shape)
    coordinates, values = to_coo(tensor)
    made[tuple(coordinates.T)] = values
    return made.reshape(-1)


def _tensor(name: str, shape: tuple[int, ...], held: Held) -> SparseTensor:
    if isinstance(held, SparseTensor):
        return held
    levels = tuple(Level(size) for size in shape)
    return SparseTensor(name, shape, Format(("dense",) * len(shape)), levels, held[: math.prod(shape)])


def _shaped(move: Move, arrays: list[np.ndarray]) -> np.ndarray:
    """Data movement on dense arrays."""
    first = arrays[0]
    if move.kind == "reshape":
        return first.reshape(move.shape)
    if move.kind == "permute":
        return first.transpose(move.args)
    if move.kind == "cat":
        return np.concatenate(arrays, axis=move.args[0])
    dim, start, step = move.args
    return np.take(first, range(start, start + step * move.shape[dim], step), axis=dim)

"""A compiled program on the CPU: products by PyTorch's library, everything else as loops compiled by numba."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilestream.sparse.cpu.binding import Binding
from tilestream.sparse.cpu.compiled import compiled_region
from tilestream.sparse.cpu.fusing import fused
from tilestream.sparse.cpu.gradients import Gradients
from tilestream.sparse.cpu.held import Held, as_tensor
from tilestream.sparse.cpu.moves import Moves
from tilestream.sparse.cpu.streamed import Streamed
from tilestream.sparse.einsum import MASKS, Move
from tilestream.sparse.outputs import OutputView, output, spread
from tilestream.sparse.program import Program, Value

MOST = 1 << 29
"""Elements of a result of loops, which is a dense array."""


@dataclass(frozen=True)
class CpuResult:
    """``outputs``: tensors of the type that the call computed in. ``seconds`` of the whole call, from the inputs as
    they were given to the outputs; ``bind`` of taking the inputs, ``regions`` of each region and move."""

    outputs: tuple[torch.Tensor, ...]
    seconds: float
    bind: float
    regions: Mapping[str, float] = field(repr=False)

    @property
    def output(self) -> torch.Tensor:
        """The only output; the first of several."""
        return self.outputs[0]


class CpuProgram:
    """The regions of a program as loops. Compiled once; ``run`` may be called with other values of the same shapes.

    ``fuse="auto"`` means another fusion here than for streams (``cpu.fusing``). A call computes in float32 where all
    that it is given is of that type or narrower, else in float64. Parameters are read where they are: what an optimiser
    changed counts in the next call. Results between regions are dense arrays. A region with a result of more than
    ``MOST`` elements runs as streams instead, and the result stays sparse: ``streamed`` has its name. Loops over the
    rows of a result run on PyTorch's threads (``torch.set_num_threads``), each row on one of them, so that results do
    not depend on how many there are; lanes of a schedule mean nothing here. ``compiled`` False leaves the loops to
    Python.

    Raises:
        SparseError: a schedule in blocks, or an order that loops cannot have.
    """

    def __init__(self, program: Program, compiled: bool = True) -> None:
        if program.asked.fuse == "auto":
            program = fused(program)
        self.program = program
        shapes = program.einsums.shapes
        made = {name for step in program.steps for name in ([step.name] if isinstance(step, Move) else step.outputs)}
        arrays = {name for name in made if not _stays_sparse(program, name)}
        arrays |= {n for n, d in program.einsums.inputs.items() if d.format is None}
        large = {name for name in made if math.prod(shapes[name]) > MOST}
        arrays -= large
        self.streamed = tuple(r.name for r in program.regions if large & r.outputs.keys())
        self._fills = {n: fill for r in program.regions for n, fill in r.fills.items() if n in large}
        self._compiled, self._back = compiled, dict[tuple[str, ...], Gradients]()
        self._moves = Moves(frozenset(arrays))
        self._binding = Binding(program, arrays)
        inputs = program.einsums.inputs
        self.regions = {
            r.name: Streamed(program, r, arrays)
            if r.name in self.streamed
            else compiled_region(r, arrays, inputs, shapes, compiled)
            for r in program.regions
        }

    @property
    def source(self) -> str:
        """The generated code."""
        return "\n\n\n".join(f"# {name}\n{one.source}" for name, one in self.regions.items())

    def run(self, *inputs: Value) -> CpuResult:
        """Run every region, one after the other; inputs as ``Program.run`` takes them. No gradients."""
        return self.execute(inputs)[0]

    def __call__(self, *inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The output, or all of several, as the module gives them, through which gradients reach the inputs and the
        module's parameters. The backward pass is loops where it is made of sums of products and the usual operators
        on elements (``gradient_by`` says so); otherwise the module runs again with PyTorch's operators, which is logged
        as a warning. It has no backward pass of its own.

        Raises:
            SparseError: inputs that are not those of the program.
        """
        program = self.program
        given = dict(zip(program.names, program.free(inputs), strict=False)) | program.owned
        wanted = {
            name: x
            for name, x in given.items()
            if isinstance(x, torch.Tensor) and x.requires_grad and name in program.einsums.inputs
        }
        if wanted and torch.is_grad_enabled():
            made = self._gradients(tuple(wanted)).call(inputs, wanted)
        else:
            made = self.run(*inputs).outputs
        return made[0] if len(made) == 1 else made

    def gradient_by(self, *names: str) -> str:
        """What computes the gradients of inputs and parameters of these names: ``loops``, or why PyTorch does."""
        return self._gradients(names).how

    def _gradients(self, wanted: tuple[str, ...]) -> Gradients:
        if wanted not in self._back:
            self._back[wanted] = Gradients(self, lambda program: CpuProgram(program, self._compiled), wanted)
        return self._back[wanted]

    def execute(self, inputs: tuple[Value, ...]) -> tuple[CpuResult, dict[str, Held]]:
        """A run, and every tensor that the regions made."""
        began = time.perf_counter()
        dtype = self._binding.dtype(inputs)
        bound = self._binding.bind(inputs, dtype)
        bind = time.perf_counter() - began
        have, seconds = self.steps(bound, dtype)
        outputs = tuple(self._output(view, have) for view in self.program.outputs)
        return CpuResult(outputs, time.perf_counter() - began, bind, seconds), have

    def steps(self, bound: Mapping[str, Held], dtype: torch.dtype) -> tuple[dict[str, Held], dict[str, float]]:
        """Regions and moves on inputs that are bound: every tensor, and the seconds of each step."""
        have, seconds = dict(bound), dict[str, float]()
        for step in self.program.steps:
            last = time.perf_counter()
            if isinstance(step, Move):
                have[step.name] = self._moves.run(step, have, dtype)
            else:
                have |= self.regions[step.name].run(have, dtype)
            seconds[step.name] = time.perf_counter() - last
        return have, seconds

    def _output(self, view: OutputView, have: Mapping[str, Held]) -> torch.Tensor:
        held = have[view.tensor]
        if isinstance(held, torch.Tensor):
            return spread(view, held)
        return output(view, as_tensor(view.tensor, held), self._fills.get(view.tensor, 0.0))


def _stays_sparse(program: Program, name: str) -> bool:
    """Whether a result is data movement of something sparse: an adjacency, a mask."""
    step = next((s for s in program.einsums.steps if s.name == name), None)
    if not isinstance(step, Move) or step.eager is not None:
        return False
    if step.kind in (*MASKS, "adjacency"):
        return True
    inputs = program.einsums.inputs
    return all(
        (x in inputs and inputs[x].format is not None) or (x not in inputs and _stays_sparse(program, x))
        for x in step.operands
    )

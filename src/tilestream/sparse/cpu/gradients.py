"""Gradients through the loops: the backward pass as loops where that is a sum of products, else PyTorch's operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from tilestream.errors import SparseError
from tilestream.sparse.cpu.adjoint import adjoint
from tilestream.sparse.cpu.held import Held
from tilestream.sparse.lowering.build import plan
from tilestream.sparse.outputs import OutputView, spread
from tilestream.sparse.program import Program
from tilestream.sparse.schedule import Schedule

log = logging.getLogger(__name__)


class Loops(Protocol):
    """What runs a program: a ``CpuProgram``."""

    program: Program

    def execute(self, inputs: tuple[Any, ...]) -> tuple[Any, dict[str, Held]]:
        """A run, which has ``outputs``, and every tensor that it made."""
        ...

    def steps(self, bound: Mapping[str, Held], dtype: torch.dtype) -> tuple[dict[str, Held], dict[str, float]]:
        """Every tensor, from inputs that are bound, and the seconds of each step."""
        ...


class Gradients:
    """Calls of a program with gradients for some of its inputs and parameters, ``wanted``.

    ``how``: ``"loops"``, or why PyTorch's operators run the module again for the backward pass.

    Raises:
        SparseError: no loops for the backward pass, and no module to run again.
    """

    def __init__(self, loops: Loops, make: Callable[[Program], Loops], wanted: tuple[str, ...]) -> None:
        program = self.program = loops.program
        self.first, self.wanted, self.how = loops, wanted, "loops"
        self.back: Loops | None = None
        try:
            if any(program.einsums.inputs[name].format is not None for name in wanted):
                raise SparseError("the gradient of a sparse tensor", "it runs in PyTorch")
            einsums, self.given, self.found = adjoint(program.einsums, wanted)
            kept = [step.name for step in program.einsums.steps if step.name in einsums.inputs]
            outputs = tuple(dict.fromkeys((*program.einsums.outputs, *kept)))
            forward = replace(program.einsums, outputs=outputs)
            schedule = program.schedule
            self.first = make(program.planned(forward, schedule, plan(forward, schedule)))
            self.back = make(Program(einsums, Schedule(), tuple(einsums.inputs)))
        except SparseError as error:
            if program.module is None:
                raise
            self.how = f"PyTorch's operators: {error.cause}"
            log.warning("the backward pass of %s runs by %s", type(program.module).__name__, self.how)

    def call(self, inputs: tuple[Any, ...], wanted: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, through which gradients reach what is wanted."""

        def forward() -> tuple[tuple[torch.Tensor, ...], dict[str, Held]]:
            result, have = self.first.execute(inputs)
            return result.outputs, have

        def backward(have: dict[str, Held], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            if self.back is None:
                return by_torch(self.program, inputs, wanted, grads)
            return self._by_loops(self.back, have, grads)

        return _Call.apply(forward, backward, *wanted.values())  # pyright: ignore[reportReturnType]

    def _by_loops(self, back: Loops, have: dict[str, Held], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        reached: dict[str, Held] = {}
        dtype = torch.float32
        for view, grad in zip(self.program.outputs, grads, strict=True):
            if view.tensor in self.given:
                name = self.given[view.tensor]
                shape = self.program.einsums.shapes[view.tensor]
                made = _gathered(view, shape, grad)
                reached[name] = reached[name] + made if name in reached else made  # pyright: ignore
                dtype = made.dtype
        given = {name: reached[name] if name in reached else have[name] for name in back.program.einsums.inputs}
        made = back.steps(given, dtype)[0]
        return [made[self.found[name]] if name in self.found else None for name in self.wanted]  # pyright: ignore


def _gathered(view: OutputView, shape: tuple[int, ...], grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor of the program from that of an output that shows it."""
    with torch.enable_grad():
        tensor = torch.zeros(shape, dtype=grad.dtype, requires_grad=True)
        return torch.autograd.grad(spread(view, tensor), tensor, grad)[0].contiguous()


class _Call(torch.autograd.Function):
    """A call as PyTorch's autograd knows it."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        outputs, ctx.have = call()
        ctx.back = back
        ctx.save_for_backward(*tensors)  # PyTorch then refuses a backward pass after they were written
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _ = ctx.saved_tensors
        return None, None, *ctx.back(ctx.have, grads)


def by_torch(
    program: Program, inputs: tuple[Any, ...], wanted: Mapping[str, torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of what is wanted by running the module again in PyTorch."""
    module = program.module
    assert module is not None
    with torch.enable_grad():
        fresh = {name: value.detach().requires_grad_() for name, value in wanted.items()}
        owned = {name: value for name, value in fresh.items() if name in program.owned}
        named = dict(zip(program.given or program.names, inputs, strict=True))
        given = [fresh.get(name, value) for name, value in named.items()]
        made = torch.func.functional_call(module, owned, tuple(given))
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        pairs = [(one, grad) for one, grad in zip(outputs, grads, strict=True) if one.requires_grad]
        found = torch.autograd.grad(
            [one for one, _ in pairs], list(fresh.values()), [grad for _, grad in pairs], allow_unused=True
        )
    return list(found)

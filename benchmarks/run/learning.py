"""Training a model to a loss: what is learned, a step of an arm as a CUDA graph, and a run of steps from a seed.

Inputs are random features, and lookups in random combinations. Targets are what another initialisation of the same
model makes of them, scaled to a variance of one, so that there is something to learn.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.run.training import results
from tilestream.apps.models import find
from tilestream.run import timing
from tilestream.run.backend import tilestream

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nerf": ("nerf", {"rows": 65536}, {"rows": 64, "depth": 3, "width": 16, "skip": 1}),
    "mgn": (
        "mgn",
        {"batch": 2, "steps": 4},
        {"batch": 1, "nodes": 12, "edges": 40, "width": 16, "hidden": 1, "steps": 1},
    ),
    "dlrm": (
        "dlrm",
        {"batch": 2048, "max_rows": 100_000},
        {"batch": 32, "bottom": (16, 8), "top": (16, 1), "table_rows": (5, 5, 5)},
    ),
}
"""Each case's model, its sizes, and those of a dry run. MeshGraphNets has 4 of its 15 steps, to compile sooner."""
RATE = 5e-4
"""Adam's; smaller ones are lost in the rounding of bf16 weights of order one."""
BATCHES = 100
"""Of each seed."""
LAST = 20
"""A loss is the mean over one of so many parts of the steps, the last."""
TOLD = 50
"""Steps between two lines of progress."""


@dataclass(frozen=True)
class Run:
    """One arm trained from one seed.

    ``steps`` that it got to, its loss at the first and over the last, the mean loss of every ``TOLD`` steps, seconds.
    """

    case: str
    arm: str
    seed: int
    steps: int
    start: float
    end: float
    curve: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Arm:
    """A model that every seed starts anew, and what runs it: compiled once."""

    name: str
    module: nn.Module
    function: Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """What is learned: ``teacher`` makes the targets, divided by ``scales``, and ``link`` brings them into range."""

    case: str
    module: nn.Module
    teacher: nn.Module
    inputs: tuple[Tensor, ...]
    scales: tuple[float, ...]
    link: Callable[[Tensor], Tensor]

    def batch(self, generator: torch.Generator) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Inputs with new features, and their targets in fp32."""
        new = tuple(self._drawn(x, generator) for x in self.inputs)
        with torch.no_grad():
            made = results(self.teacher(*new))
        pairs = zip(made, self.scales, strict=True)
        return new, [self.link((y.float() - y.float().mean()) / scale) for y, scale in pairs]

    def _drawn(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Features anew; lookups [tables, samples] in another order in every table; a graph as it is."""
        if x.is_floating_point():
            return torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype)
        if self.case != "dlrm":
            return x
        return x.gather(1, torch.rand(x.shape, device=x.device, generator=generator).argsort(1))


def task(case: str, tiny: bool, device: str) -> Task:
    """A case's model and its teacher, which differ by their seeds."""
    model, sizes, small = CASES[case]
    own = small if tiny else sizes
    module, inputs = find(model).make(device=device, training=True, **own)
    teacher, _ = find(model).make(device=device, training=True, seed=1234, **own)
    link: Callable[[Tensor], Tensor] = nn.Identity()
    if case == "dlrm":  # what comes out is a probability: the teacher's logits are brought to a variance of one
        teacher.top, link = teacher.top[:-1], nn.Sigmoid()  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        scales = tuple(float(y.float().std()) + 1e-6 for y in results(teacher(*inputs)))
    return Task(case, module, teacher, inputs, scales, link)


def arms(found: Task, names: Sequence[str]) -> list[Arm]:
    """A copy of the model for each arm. Ours is the reference machine where there is no GPU."""
    made = []
    on_cpu = found.inputs[0].device.type == "cpu"
    how: dict[str, dict[str, Any]] = {
        "inductor": {},
        "tilestream": {"backend": tilestream, "options": {"target": "reference"} if on_cpu else None},
    }
    for name in names:
        own = copy.deepcopy(found.module)
        function = own if name == "eager" else torch.compile(own, dynamic=False, **how[name])
        made.append(Arm(name, own, function))
    return made


class Step:
    """One training step of an arm. On a GPU a CUDA graph, which reads inputs and targets where they are copied to."""

    def __init__(self, arm: Arm, found: Task) -> None:
        on_gpu = found.inputs[0].device.type == "cuda"
        self._arm = arm
        wanted = [p for p in arm.module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(wanted, lr=RATE, fused=on_gpu, capturable=on_gpu)
        self._inputs, self._targets = found.batch(torch.Generator(found.inputs[0].device))
        self._captured = timing.capture(self._run, most_calls=1) if on_gpu else None

    def _run(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        made = results(self._arm.function(*self._inputs))
        loss = torch.stack([(y.float() - t).square().mean() for y, t in zip(made, self._targets, strict=True)]).sum()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def start(self, seed: int) -> None:
        """The parameters of this seed, and an optimizer that has seen nothing."""
        started(self._arm.module, seed)
        for state in self._optimizer.state.values():
            for kept in state.values():
                kept.zero_()

    def __call__(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The loss before the step."""
        for own, new in zip((*self._inputs, *self._targets), (*inputs, *targets), strict=True):
            own.copy_(new)
        if self._captured is None:
            return self._run()
        self._captured.graph.replay()
        loss = self._captured.outputs
        assert isinstance(loss, Tensor)
        return loss.clone()


def started(module: nn.Module, seed: int) -> None:
    """The parameters of this seed."""
    torch.manual_seed(seed)
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()


def train(
    arm: Arm, run: Step, found: Task, seed: int, steps: int, seconds: float, told: Callable[[str], object] = print
) -> Run:
    """Train from this seed, for so many steps or seconds, whichever is over first."""
    run.start(seed)
    generator = torch.Generator(found.inputs[0].device).manual_seed(seed)
    batches = [found.batch(generator) for _ in range(min(steps, BATCHES))]
    losses: list[Tensor] = []
    begin = time.perf_counter()
    for step in range(steps):
        losses.append(run(*batches[step % len(batches)]))
        if step % TOLD == TOLD - 1 or step == steps - 1:
            spent = time.perf_counter() - begin
            at = f"step {step + 1} of {steps}, loss {losses[-1].item():.5f}, {spent:.0f} s"
            told(f"{found.case} {arm.name} seed {seed}: {at}")
            if spent > seconds:
                break
    values = torch.stack(losses).tolist()
    end = statistics.fmean(values[-max(1, len(values) // LAST) :])
    curve = tuple(statistics.fmean(values[k : k + TOLD]) for k in range(0, len(values), TOLD))
    return Run(found.case, arm.name, seed, len(values), values[0], end, curve, time.perf_counter() - begin)

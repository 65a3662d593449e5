"""Decode steps of made-up models: operands of the operator, and its kernel on the host's machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.cuda.host.build import OF_FILE, Arena, HostRun, bytes_of, left_at, run_call, runner
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.step import values_of
from tilestream.graph.decode.op import step
from tilestream.kernels.parts.source import Call, Part
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape, names_of

BF16 = torch.bfloat16
NUMBERS = (0.11, 1e-5, 1e-6)
"""Scale of scores, epsilon of norms of rows and of heads."""


@dataclass
class Step:
    """Operands of ``graph.decode.op.step``, in its order."""

    row: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    weights: list[Tensor]
    caches: list[Tensor]
    lengths: list[Tensor]

    def to(self, dtype: torch.dtype) -> Step:
        """A copy in another precision, lengths as they are."""
        mask = None if self.mask is None else self.mask.to(dtype)
        weights, caches = ([t.to(dtype, copy=True) for t in ts] for ts in (self.weights, self.caches))
        small = (t.to(dtype) for t in (self.row, self.cos, self.sin))
        return Step(*small, mask, weights, caches, [n.clone() for n in self.lengths])

    def run(self) -> Tensor:
        """The logits by the operator's meaning; caches are written, lengths counted."""
        everything = (self.row, self.cos, self.sin, self.mask, self.weights, self.caches, self.lengths)
        return step(*everything, True, *NUMBERS)


def made_up(shape: Shape, place: int, seed: int = 0, device: str = "cpu") -> Step:
    """A token at ``place`` of a cache."""
    g = torch.Generator(device).manual_seed(seed)

    def data(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=g, device=device) * scale).to(BF16)

    query, keys = shape.heads * shape.features, shape.key_heads * shape.features
    sizes = {
        "query": (query, shape.width), "key": (keys, shape.width), "value": (keys, shape.width),
        "output": (shape.width, query), "gate": (shape.hidden, shape.width), "up": (shape.hidden, shape.width),
        "down": (shape.width, shape.hidden),
    }  # fmt: skip

    def weight(name: str) -> Tensor:
        if "norm" in name:
            return 1 + data(shape.features if name in ("query_norm", "key_norm") else shape.width, scale=0.1)
        return data(*sizes[name], scale=sizes[name][1] ** -0.5)

    weights = [weight(name) for _ in range(shape.layers) for name in names_of(shape.head_norms)]
    weights += [1 + data(shape.width, scale=0.1), data(shape.vocabulary, shape.width, scale=shape.width**-0.5)]
    caches = [data(1, shape.key_heads, shape.positions, shape.features) for _ in range(2 * shape.layers)]
    angle = torch.rand(1, 1, shape.features, generator=g, device=device) * 6
    there = torch.arange(shape.positions, device=device) <= place
    mask = torch.where(there, 0.0, float("-inf")).to(BF16).view(1, 1, 1, -1) if shape.masked else None
    lengths = [torch.tensor(place, device=device) for _ in range(shape.layers)]
    return Step(data(1, 1, shape.width), angle.cos().to(BF16), angle.sin().to(BF16), mask, weights, caches, lengths)


def on_host(given: Step, kernel: StepKernel, ctas: int, options: HostRun | None = None, steps: int = 1) -> list[Tensor]:
    """The logits of ``steps`` steps, one after another on one workspace, by the kernel's own text on the host.

    Caches and lengths of ``given`` are written as the kernel leaves them.
    """
    arena, at = Arena(size=1 << 14), dict[int, int]()
    out = torch.full((1, kernel.shape.vocabulary), float("nan"), dtype=BF16)
    held = [given.row, given.cos, given.sin, out, *given.weights, *given.caches, *given.lengths]
    masks = [] if given.mask is None else [given.mask]
    for t in (*held, *masks):
        at[t.data_ptr()] = OF_FILE + arena.add(bytes_of(t))
    space = {name: OF_FILE + arena.add(bytes(size)) for name, size in kernel.space.parts}
    key = [at[t.data_ptr()] for t in held] + [at[t.data_ptr()] for t in masks or ()] + [0] * (not masks)
    values = values_of(kernel.shape, [*key, 1, *NUMBERS])
    run = runner(kernel, kernel.source, (ctas, 1), options or HostRun())
    call = Call({}, space, 0, Part(0, 1, 1), encoded, values=values)
    made = []
    for _ in range(steps):
        raw = run_call(kernel, kernel.source, call, arena, run)
        made.append(left_at(raw, at[out.data_ptr()] - OF_FILE, out))
        for t in (*given.caches, *given.lengths):
            t.copy_(left_at(raw, at[t.data_ptr()] - OF_FILE, t))
    return made

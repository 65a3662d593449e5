"""Decode steps of made-up models: operands of the operator, and its kernel on the host's machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestream.cuda.host.build import OF_FILE, Arena, HostRun, bytes_of, left_at, run_call, runner
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.step import stamps_of, steps_of, values_of
from tilestream.graph.decode.op import decode_step
from tilestream.kernels.parts.source import Call, Part
from tilestream.kernels.step.form import Form
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape
from tilestream.run.record_step import operands

BF16 = torch.bfloat16
NUMBERS = (0.11, 1e-5, 1e-6, 0.75)
"""Scale of scores, epsilon of norms of rows and of heads, what blocks are multiplied by."""

OF_ALL = ("query", "output", "gate", "down", "head")
FORMS = {
    "Qwen2's": Form(biased=("query",)),
    "Gemma's": Form(norm="rms_plus_one", activation="gelu_tanh"),
    "Phi-3's": Form(qkv="parts", gate_up="parts"),
    "StableLM's": Form(norm="layer", rotary=0.25),
    "StarCoder2's": Form(norm="layer", activation="gelu_tanh", gated=False, biased=OF_ALL[:-1]),
    "Arcee's": Form(activation="relu_squared", gated=False),
    "Phi-4's": Form(qkv="parts", gate_up="parts", rotary=0.75),
    "blocks beside each other, of RMSNorm": Form(parallel=True),
    "a wide head's": Form(rotary=0.5, head_norms=True, activation="relu"),
    "SmolLM3's": Form(no_rope=(1,)),
    "turned parts": Form(turned=True, qkv="parts", rotary=0.0),
    "Phi's": Form(norm="layer", activation="gelu_tanh", gated=False, biased=OF_ALL, rotary=0.5, parallel=True),
    "Pythia's": Form(
        norm="layer", activation="gelu", gated=False, biased=OF_ALL[:-1], rotary=0.25, parallel=True, qkv="heads"
    ),
}
"""Of decoders, and some that none has."""


@dataclass
class Step:
    """Operands of ``graph.decode.op.decode_step``, in its order."""

    row: Tensor
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    weights: list[Tensor]
    caches: list[Tensor]
    lengths: list[Tensor]
    form: str

    def to(self, dtype: torch.dtype) -> Step:
        """A copy in another precision, lengths as they are."""
        weights, caches = ([t.to(dtype, copy=True) for t in ts] for ts in (self.weights, self.caches))
        cos, sin, mask = (None if t is None else t.to(dtype) for t in (self.cos, self.sin, self.mask))
        return Step(self.row.to(dtype), cos, sin, mask, weights, caches, [n.clone() for n in self.lengths], self.form)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.row, self.cos, self.sin, self.mask, self.weights, self.caches, self.lengths

    @property
    def operands(self) -> tuple[Any, ...]:
        return *self.tensors, self.form

    def run(self) -> Tensor:
        """The logits by the operator's meaning; caches are written, lengths counted."""
        return decode_step(*self.operands, True, *NUMBERS)


def made_up(shape: Shape, place: int, seed: int = 0, device: str = "cpu") -> Step:
    """A token at ``place`` of a cache; of several sequences each has its position, and hides another first part."""
    row, _, _, _, weights, caches, lengths, form, *_ = operands(shape, place, device, seed)
    angle = torch.rand(shape.batch, 1, shape.rotary, generator=torch.Generator().manual_seed(seed)).to(device) * 6
    at, hidden = torch.arange(shape.positions, device=device), torch.arange(shape.batch, device=device)[:, None]
    mask = torch.where((at <= place) & (at >= hidden.clamp(max=place)), 0.0, float("-inf")).to(BF16)
    turn = (None, None) if not shape.rotary else (angle.cos().to(BF16), angle.sin().to(BF16))
    return Step(row, *turn, mask[:, None, None] if shape.masked else None, weights, caches, lengths, form)


def on_host(
    given: Step, kernel: StepKernel, ctas: int, options: HostRun | None = None, steps: int = 1,
    stamps: list[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The logits of ``steps`` steps, one after another on one workspace, by the kernel's own text on the host.

    Caches and lengths of ``given`` are written as the kernel leaves them; those of a kernel with stamps are added to
    ``stamps``.
    """
    arena, at = Arena(size=1 << 14), {0: 0}
    out = torch.full((kernel.shape.batch, kernel.shape.vocabulary), float("nan"), dtype=BF16)
    small = [given.row, given.cos, given.sin, given.mask]
    held = [0 if t is None else t.data_ptr() for t in (*small, out, *given.weights, *given.caches, *given.lengths)]
    for t in (*small, out, *given.weights, *given.caches, *given.lengths):
        if t is not None:
            at[t.data_ptr()] = OF_FILE + arena.add(bytes_of(t))
    first = {True: b"\0", False: b"\xff"}
    space = {n: OF_FILE + arena.add(first[n in kernel.space.zeros] * size) for n, size in kernel.space.parts}
    noted = torch.zeros(stamps_of(kernel.shape, ctas) if kernel.stamps else 0, dtype=torch.int64)
    noted_at = OF_FILE + arena.add(bytes_of(noted))
    steps_apart = steps_of(given.cos, given.mask, kernel.shape)
    values = values_of(kernel.shape, [*(at[address] for address in held), *steps_apart, 1, *NUMBERS])
    values |= {"stamps": noted_at}
    run = runner(kernel, kernel.source, (ctas, 1), options or HostRun())
    call = Call({}, space, 0, Part(0, 1, 1), encoded, values=values)
    made = []
    for _ in range(steps):
        raw = run_call(kernel, kernel.source, call, arena, run)
        made.append(left_at(raw, at[out.data_ptr()] - OF_FILE, out))
        if stamps is not None:
            stamps.append(left_at(raw, noted_at - OF_FILE, noted))
        for t in (*given.caches, *given.lengths):
            t.copy_(left_at(raw, at[t.data_ptr()] - OF_FILE, t))
    return made

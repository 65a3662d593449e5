"""Operators that stayed out of every region: grouped, with the modules they belong to and what to do about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.plan.analysis import Analysis
from tilestream.plan.parts import Excluded
from tilestream.report.words import percent

_ADVICE = (
    ("float32 matmul", 'torch.set_float32_matmul_precision("high"), or model.bfloat16()'),
    ("model.eval()", "model.eval()"),
    ("a kernel of ours is timed beside it", "nothing: the faster one runs"),
    ("attention", "nothing: attention's own kernel is near the limit"),
    ("convolution", "nothing: cuDNN runs it"),
    ("columns at most", "nothing: a library is near the limit for wide layers; narrower ones stream"),
    ("no linear layer beside it", "nothing: Inductor fuses it"),
    ("only bfloat16, float16 and float32", "convert to bfloat16, float16 or float32, if the model can do with it"),
    ("copies between devices", "move it out of the model"),
    ("an operand is on", "move the model and its inputs to one device"),
    ("is dynamic", "torch.compile(dynamic=False), or a constant size"),
    ("symbolic", "torch.compile(dynamic=False), or a constant size"),
    ("a slice with a step", "make the tensor contiguous first, or slice without a step"),
    ("normalises more than the last dimension", "normalise the last dimension alone"),
    ("its channels are not the last dimension", "give it [rows, features]"),
    ("broadcasts along rows", "expand it to all rows, or make it a vector of features"),
    ("random numbers", "make them outside and give them as an input"),
    ("makes a tensor of its own", "nothing, or make it once in __init__"),
)


@dataclass(frozen=True)
class Group:
    """Equal exclusions: the operator, why, how often, in which modules and lines, with how many FLOPs."""

    op: str
    reason: str
    number: int
    modules: tuple[str, ...]
    sources: tuple[str, ...]
    flops: int

    @property
    def title(self) -> str:
        """``aten.convolution.default x4``."""
        return self.op if self.number == 1 else f"{self.op} x{self.number}"

    @property
    def advice(self) -> str:
        """What the user can do; empty where nothing is known."""
        if "_transformer_encoder_layer_fwd" in self.op:
            return "torch.backends.mha.set_fastpath_enabled(False) shows its layers, which can stream"
        return next((what for words, what in _ADVICE if words in self.reason), "")


def groups(exclusions: Sequence[Excluded]) -> list[Group]:
    """One group an operator and reason, those with most FLOPs first, then in the order of the model."""
    found: dict[tuple[str, str], list[Excluded]] = {}
    for e in exclusions:
        found.setdefault((e.op, e.reason), []).append(e)
    made = [
        Group(
            op,
            reason,
            len(members),
            tuple(dict.fromkeys(e.module for e in members if e.module)),
            tuple(dict.fromkeys(e.source for e in members if e.source)),
            sum(e.flops for e in members),
        )
        for (op, reason), members in found.items()
    ]
    return sorted(made, key=lambda g: -g.flops)


def share(group: Group, a: Analysis) -> str:
    """Of the model's FLOPs, in percent; empty where it has none."""
    return percent(group.flops, a.coverage.whole.flops) if group.flops else ""

"""An interaction on the GPU: our kernels beside what Inductor makes of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilestream.graph.interaction import INTERACTION, INTERACTION_BACKWARD
from tilestream.graph.interaction.op import interaction, interaction_backward, multiplied, picked, stacked
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.interaction import Kind, Sizes
from tilestream.run import fallback
from tilestream.run.target import Target
from tilestream.run.timer import Trial

MOST_TABLES = 4 << 30
"""Bytes of tables that are made up: many times the L2, so that larger ones would take no longer."""


@dataclass(frozen=True)
class Operands:
    """Tensors like those of a site, made up."""

    sources: list[Tensor]
    indices: list[Tensor | None]
    first: Tensor
    second: Tensor
    given: Tensor
    head: int

    @property
    def ours(self) -> tuple[list[Tensor], list[Tensor | None], Tensor, Tensor]:
        return self.sources, self.indices, self.first, self.second


def interaction_trial(kind: Kind, target: Target) -> Trial:
    """One call of ours and of the library's, forward, or forward and backward; held to PyTorch's operators."""
    sizes, training = kind.sizes, kind.training

    def make() -> list[Any]:
        made = operands(sizes, kind.tables, getattr(torch, kind.dtype.removeprefix("torch.")), target.device)
        return [*made.ours, made.given]

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        made = Operands(*values, head=sizes.head)
        if candidate.strategy == FALLBACK:
            passes = [library_forward(made, training), *([library_backward(made)] if training else [])]
            return lambda: [result for run in passes for result in run()]
        return lambda: _passes(INTERACTION, INTERACTION_BACKWARD, made, training)

    def plain(*values: Any) -> list[Tensor]:
        return _passes(interaction, interaction_backward, Operands(*values, head=sizes.head), training)

    return Trial("interaction", make, call, plain)


def _passes(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor], made: Operands, training: bool
) -> list[Tensor]:
    results = [forward(*made.ours, made.head)]
    return [*results, backward(*made.ours, made.given)] if training else results


def operands(sizes: Sizes, tables: Sequence[int], dtype: torch.dtype, device: torch.device) -> Operands:
    """Random rows, and indices all over the tables; pairs are those of a lower triangle, again and again."""
    generator = torch.Generator(device).manual_seed(0)
    most = max(1, MOST_TABLES // (len(tables) * sizes.features * sizes.element))
    rows = [min(n, most) or sizes.batch for n in tables]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    sources = [normal(n, sizes.features) for n in rows]
    indices = [
        torch.randint(n, (sizes.batch,), device=device, generator=generator) if table else None
        for n, table in zip(rows, tables, strict=True)
    ]
    triangle = torch.tril_indices(sizes.vectors, sizes.vectors, -1, device=device)
    named = torch.arange(sizes.pairs, device=device) % triangle.shape[1]
    return Operands(
        sources, indices, triangle[0, named], triangle[1, named], normal(sizes.batch, sizes.pairs), sizes.head
    )


# -- the library's way


def library_forward(made: Operands, training: bool) -> Callable[[], Sequence[Tensor]]:
    """Lookups, products and the selection by Inductor; ``training``: the rows are saved, too."""

    def run(sources: list[Tensor], indices: list[Tensor | None], first: Tensor, second: Tensor) -> list[Tensor]:
        rows = stacked(sources, indices)
        result = picked(rows, first, second, made.head, pad=False)
        return [result, rows] if training else [result]

    return _compiled(run, *made.ours)


def library_backward(made: Operands) -> Callable[[], Sequence[Tensor]]:
    """Gradients of the rows from rows that were saved, by Inductor."""
    rows = stacked(made.sources, made.indices)
    return _compiled(lambda *values: [multiplied(*values)], rows, made.first, made.second, made.given)


def _compiled(run: Callable[..., list[Tensor]], *operands: Any) -> Callable[[], Sequence[Tensor]]:
    """``run`` on tensors, and lists of tensors or None."""
    leaves, layout = tree_flatten(operands)
    values, mode = [x for x in leaves if x is not None], FakeTensorMode()

    def flat(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        return run(*tree_unflatten([None if x is None else next(left) for x in leaves], layout))

    with mode:
        graph = make_fx(flat, tracing_mode="real")(*[mode.from_tensor(v) for v in values])
    call = fallback.rest(graph)
    return lambda: call(values)

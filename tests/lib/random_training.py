"""Random training steps: the functions of ``random_graphs``, whose weights and inputs take gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from random_graphs import Graph
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tilestream.run import oracle
from tilestream.run.backend import tilestream

Gradients = list[Tensor | None]


class TrainingStep:
    """A random function, and the gradients of its weights and inputs by what runs it: compiled, or as it is."""

    def __init__(self, seed: int) -> None:
        self.seed, self.graph = seed, Graph(seed)
        self.graph.dynamic = None
        if seed % 2:
            self.graph.dtype = torch.bfloat16
            self.graph.bfloat16()
        for weight in self.graph.weights:
            weight.requires_grad_(weight.is_floating_point())

    def gradients(self, function: Any, inputs: Sequence[Tensor] | None = None) -> Gradients:
        """None for what the results do not depend on; nothing at all where they depend on no weight and no input."""
        self.graph.state.zero_()
        given = self.graph.inputs() if inputs is None else inputs
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
        taken = [x.clone() for x in leaves]  # a leaf that takes a gradient cannot be written
        results = checkpoint(function, *taken, use_reentrant=False) if self.seed % 3 == 0 else function(*taken)
        squares = [r.float().square().mean() for r in results if r.requires_grad]
        wanted = [leaf for leaf in (*self.graph.weights, *leaves) if leaf.requires_grad]
        return list(torch.autograd.grad(sum(squares), wanted, allow_unused=True)) if squares else []  # pyright: ignore

    def compiled(self, backend: Any, **keywords: Any) -> Gradients:
        torch._dynamo.reset()
        return self.gradients(torch.compile(self.graph, backend=backend, **keywords))

    def exact(self) -> Gradients:
        """In float64."""
        traced = make_fx(lambda *inputs: self.gradients(self.graph, inputs))(*self.graph.inputs())
        with torch.no_grad(), oracle.Float64():
            return traced(*self.graph.inputs())


def wrong(seed: int) -> str:
    """What is wrong with the gradients of one random training step on the reference machine; empty if nothing is.

    They are as near to float64 as eager's, and have the strides that eager's or AOTAutograd's have: what AOTAutograd
    traces may lie otherwise than what autograd makes.
    """
    step = TrainingStep(seed)
    try:
        eager = step.gradients(step.graph)
        traced = step.compiled("aot_eager")
    except Exception:
        return ""  # torch alone cannot
    made = step.compiled(tilestream, options={"target": "reference", "cache": False})
    exact: Gradients = []
    for n, (mine, plain, theirs) in enumerate(zip(made, eager, traced, strict=True)):
        if mine is None or theirs is None:
            if mine is not theirs and (mine is None) is not (plain is None):
                return f"gradient {n} is {'none' if mine is None else 'there'}"
            continue
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"gradient {n}: {mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
        if mine.stride() not in (theirs.stride(), mine.stride() if plain is None else plain.stride()):
            return f"gradient {n}: strides {mine.stride()} for {theirs.stride()}"
        if torch.equal(mine, theirs):
            continue
        exact = exact or step.exact()
        error, own = (_error(g, exact[n]) for g in (mine, theirs))
        # Or all that is left is rounding: what the operands were is lost in both.
        if error > max(oracle.tolerance(own, mine.dtype), 0.03) and (own <= 0.05 or error >= 20 * own):
            return f"gradient {n}: error {error:.2e}, eager's {own:.2e}"
    return ""


def _error(mine: Tensor, exact: Tensor | None) -> float:
    assert exact is not None
    return oracle.error(mine, exact)

"""Layers over the tokens of images on a GPU: our kernel beside a library's products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from tilestream.graph.token_mixing import TOKEN_MIXING, token_mixing
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.token_mixing import Kind
from tilestream.run.made_up import normals
from tilestream.run.target import Target
from tilestream.run.timer import Trial

EPS = 1e-6


def mixing_trial(kind: Kind, target: Target) -> Trial:
    """Our kernel, and less than a library and Inductor must do: the norm, and both products of what lies turned
    already. Held to PyTorch's operators."""
    m = kind.mixing

    def make() -> list[Any]:
        normal = normals(target.device, TORCH_DTYPES[m.dtype])
        vectors = [normal(m.channels) if m.normed else None for _ in range(2)]
        sizes = (m.hidden, m.tokens), (m.tokens, m.hidden)
        layers = [each for out, width in sizes for each in (normal(out, width) / width**0.5, normal(out))]
        images = [normal(kind.images, m.tokens, m.channels) for _ in range(1 + m.residual)]
        return [images[0], *vectors, *layers, images[1] if m.residual else None]

    def by(operator: Callable[..., Tensor], *values: Any) -> list[Tensor]:
        x, gamma, beta, *layers, residual = values
        return [operator(x, gamma, beta, EPS, *layers, m.activation, m.normed, residual)]

    def library(*values: Any) -> list[Tensor]:
        x, gamma, beta, w1, _, w2, *_ = values
        rows = functional.layer_norm(x, x.shape[2:], gamma, beta, EPS) if m.normed else x
        return [rows.view(-1, m.tokens) @ w1.t() @ w2.t()]

    return Trial.of_two("token mixing", make, partial(by, TOKEN_MIXING), library, partial(by, token_mixing))

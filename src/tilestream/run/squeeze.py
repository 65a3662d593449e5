"""Gates of squeeze and excite on a GPU: our kernel beside a library's sum and products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilestream.graph.squeeze import SQUEEZE, squeeze
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.squeeze import Kind
from tilestream.run.made_up import normals
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def gate_trial(kind: Kind, target: Target) -> Trial:
    """Our kernel, and less than a library must do: the sum and both products. Held to PyTorch's operators."""
    shape, dtype = kind.shape, TORCH_DTYPES[kind.shape.dtype]

    def make() -> list[Any]:
        normal = normals(target.device, dtype)
        sizes = (shape.hidden, shape.channels), (shape.channels, shape.hidden)
        first, second = (normal(*layer, 1, 1) / layer[1] ** 0.5 for layer in sizes)
        sums = normal(kind.pictures, kind.parts, shape.channels, dtype=torch.float32)
        return [sums, 1 / kind.parts, first, normal(shape.hidden), second, normal(shape.channels)]

    def by(operator: Callable[..., Tensor], *values: Any) -> list[Tensor]:
        return [operator(*values, shape.activation, shape.gate)]

    def library(*values: Any) -> list[Tensor]:
        sums, _, first, _, second, _ = values
        return [torch.sum(sums, 1, dtype=dtype) @ first.flatten(1).t() @ second.flatten(1).t()]

    return Trial.of_two("squeeze", make, partial(by, SQUEEZE), library, partial(by, squeeze))

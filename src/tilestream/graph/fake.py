"""Fake tensors: shapes without memory, so that a model is captured without being run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


def faked(
    model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """A fake mode, and the inputs as tensors of it, which have shapes and no memory; those that are fake already stay.

    Real parameters become fake where an operator meets them.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    parameters = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    leaves = tree_leaves((list(inputs), dict(keywords)))
    mode = detect_fake_mode([*leaves, *parameters])
    if mode is None:
        dynamic = any(name.startswith("_dynamo") for x in leaves for name in getattr(x, "__dict__", ()))
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if dynamic else None)

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x if is_fake(x) else fake_tensor(x, mode)

    found = tree_map_only(torch.Tensor, fake, (list(inputs), dict(keywords)))
    return mode, *found


def fake_tensor(
    x: torch.Tensor, mode: Any, dtype: torch.dtype | None = None, device: str | None = None
) -> torch.Tensor:
    """A fake tensor of ``mode`` like ``x``: of ``dtype`` where ``x`` is floating point, on ``device`` where given."""
    wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
    with mode:
        made = torch.empty_strided(x.shape, x.stride(), dtype=wanted, device=device or x.device)
    for name, value in x.__dict__.items():  # marks of dynamic dimensions
        setattr(made, name, value)
    return made.requires_grad_(x.requires_grad)


def twin(model: nn.Module, mode: Any, dtype: torch.dtype | None = None, device: str | None = None) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are fake tensors, as ``fake_tensor`` makes them."""
    memo: dict[int, Any] = {id(b): fake_tensor(b, mode, dtype, device) for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(fake_tensor(p.detach(), mode, dtype, device), p.requires_grad)
    return copy.deepcopy(model, memo)


def is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(x, FakeTensor) for x in tree_leaves(value))

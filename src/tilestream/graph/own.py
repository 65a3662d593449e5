"""How an operator of ours is defined: what it means on any device, the shapes of its results, its kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tilestream.graph.nodes import argument, number, packet

LIBRARY = torch.library.Library("tilestream", "FRAGMENT")
KERNELS: dict[str, str] = {}
"""What computes operators of ours on a GPU, by their names."""
OPERATORS: list[torch._ops.OpOverload] = []
"""All that were defined."""


def operator(
    meaning: Callable[..., Any], shapes: Callable[..., Any], kernel: str = "", writes: Sequence[str] = ()
) -> torch._ops.OpOverload:
    """``tilestream::`` and the name of ``meaning``, whose signature it has, which computes it where it has no kernel.

    On a GPU ``kernel`` computes it, a function of ``tilestream.cuda`` (``"module:function"``), loaded when it is first
    called. ``writes``: the arguments that it writes.

    Its operands keep their strides: with flexible layouts Inductor would pad rows of what it computes, and every call
    would copy them back.
    """
    name = meaning.__name__
    schema = torch.library.infer_schema(meaning, mutates_args=writes, op_name=name)
    LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
    LIBRARY.impl(name, meaning, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilestream::{name}", shapes, lib=LIBRARY)
    if kernel:
        KERNELS[name] = kernel
        LIBRARY.impl(name, lambda *given: loaded(kernel)(*given), "CUDA")
    OPERATORS.append(getattr(torch.ops.tilestream, name).default)
    return OPERATORS[-1]


def activated(kind: str, x: torch.Tensor) -> torch.Tensor:
    """The activation that operators of ours call ``kind``: as torch does, but for three."""
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if kind == "relu_squared":
        return functional.relu(x).square()
    return x if kind == "none" else getattr(functional, kind)(x)


def activation_of(node: fx.Node) -> str:
    """What ``activated`` calls the activation that a node is; the name of another operator."""
    kind = getattr(packet(node), "__name__", "")
    if kind == "gelu" and argument(node, 1, "approximate", "none") == "tanh":
        return "gelu_tanh"
    if kind == "hardtanh" and (number(node, 1, "min", -1), number(node, 2, "max", 1)) == (0, 6):
        return "relu6"
    return kind


@cache
def loaded(kernel: str) -> Callable[..., Any]:
    """The function of ``tilestream.cuda`` that is called so."""
    module, _, name = kernel.partition(":")
    return getattr(import_module(f"tilestream.cuda.{module}"), name)


def on_gpu(defined: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
    """Have ``kernel`` compute an operator of ours on a GPU."""
    LIBRARY.impl(defined._opname, kernel, "CUDA")

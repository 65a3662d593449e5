"""Operators of a model that run outside of every graph: what Dynamo left to Python."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilestream.graph.costs import flops
from tilestream.graph.costs.work import dtype_of, size
from tilestream.graph.nodes import VIEWS, aten
from tilestream.graph.provenance import OTHERS, function

_FREE = VIEWS | {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.lift_fresh, aten.empty, aten.empty_like}


@dataclass(frozen=True)
class EagerOp:
    """One call of an operator: its name, the user's line, and the kernel that it is: its FLOPs, the dtype of products
    (bf16, f16, f32, float64), and bytes between DRAM and the chip."""

    op: str
    source: str
    flops: int
    dtype: str
    bytes: float


class Watch(TorchDispatchMode):
    """Notes every operator that computes, unless ``inside`` says that a graph is running, or torch is tracing one."""

    supports_higher_order_operators = True  # flex_attention's: inside of graphs

    def __init__(self, inside: Callable[[], bool]) -> None:
        super().__init__()
        self._inside = inside
        self.found: list[EagerOp] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles nothing under a mode that is not torch's own, and this one must not change what it sees."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        from torch._guards import TracingContext

        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", func)
        computes = getattr(func, "namespace", "") == "aten" and packet not in _FREE
        if computes and not self._inside() and TracingContext.try_get() is None:
            amount = flops.of_call(packet, args, kwargs or {}, result)
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            moved = sum(size(x) * x.element_size() for x in tensors)
            self.found.append(EagerOp(str(func), _line(), amount, dtype_of(tensors), moved))
        return result


def _line() -> str:
    """The user's line that is running: ``file.py:12 in forward: code``."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OTHERS):
        frame = frame.f_back
    if frame is None:
        return ""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}:{line} in {function(code.co_name)}: {text}"

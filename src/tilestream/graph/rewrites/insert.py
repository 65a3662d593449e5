"""New nodes of an ATen graph, with values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg

from tilestream.graph.nodes import aten


def call(like: fx.Node, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
    """A call where the graph of ``like`` inserts, with a value, and of the user's line that ``like`` is of.

    ``like`` lends its fake tensors' mode where no argument is a tensor.
    """
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {name: x for name, x in like.meta.items() if name not in ("val", "tensor_meta")}
    fakes: Any = map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = mode_of(n.meta.get("val") for n in (*node.all_input_nodes, like))
    with mode or contextlib.nullcontext():  # on the meta device there is none
        node.meta["val"] = target(*fakes[0], **fakes[1])
    return node


def size(like: fx.Node, x: fx.Node, dim: int = 0) -> Any:
    """A size of a tensor: a number, or a node of the graph."""
    found = x.meta["val"].shape[dim]
    return found if isinstance(found, int) else call(like, aten.sym_size.int, x, dim)


def cast(like: fx.Node, x: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """``x`` in ``dtype``, or in that of ``like``."""
    wanted = dtype or like.meta["val"].dtype
    return x if x.meta["val"].dtype == wanted else call(like, aten._to_copy.default, x, dtype=wanted)


def mode_of(values: Iterable[object]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among values; None without one."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)

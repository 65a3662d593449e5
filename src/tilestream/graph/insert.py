"""New nodes of an ATen graph, with values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg


def call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    like: fx.Node,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> fx.Node:
    """A call where the graph inserts, with a value, and where ``like`` came from.

    ``like`` lends its fake tensors' mode where no argument is a tensor.
    """
    node = graph.call_function(target, args, dict(kwargs))
    node.meta = {name: x for name, x in like.meta.items() if name not in ("val", "tensor_meta")}
    fakes = map_arg(args, lambda n: n.meta["val"])
    mode = mode_of(n.meta["val"] for n in (*node.all_input_nodes, like))
    with mode or contextlib.nullcontext():  # on the meta device there is none
        node.meta["val"] = target(*fakes, **kwargs)
    return node


def mode_of(values: Iterable[object]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among values; None without one."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)

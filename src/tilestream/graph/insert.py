"""New nodes of an ATen graph, with values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
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
    with _mode([*node.all_input_nodes, like]):
        node.meta["val"] = target(*fakes, **kwargs)
    return node


def _mode(nodes: list[fx.Node]) -> FakeTensorMode:
    found = (getattr(n.meta["val"], "fake_mode", None) for n in nodes if isinstance(n.meta["val"], torch.Tensor))
    mode = next(m for m in found if m is not None)
    assert isinstance(mode, FakeTensorMode)
    return mode

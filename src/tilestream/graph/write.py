"""New nodes in a traced graph, with the values that they would have."""

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
    target: torch._ops.OpOverload,
    args: tuple,
    like: fx.Node,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> fx.Node:
    """A call where the graph inserts, with a value, and where ``like`` came from."""
    node = graph.call_function(target, args, dict(kwargs))
    node.meta = {name: x for name, x in like.meta.items() if name not in ("val", "tensor_meta")}
    fakes = map_arg(args, lambda n: n.meta["val"])
    mode = next(m for m in (getattr(n.meta["val"], "fake_mode", None) for n in node.all_input_nodes) if m is not None)
    assert isinstance(mode, FakeTensorMode)
    with mode:
        node.meta["val"] = target(*fakes, **kwargs)
    return node

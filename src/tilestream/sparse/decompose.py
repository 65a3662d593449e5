"""Operators without a lowering as graphs of simpler ones, by PyTorch's own decompositions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.sparse.folding import named, operator_name
from tilestream.sparse.operators import OPERATORS

_aten = torch.ops.aten
_MORE = [
    _aten.var_mean,
    _aten._adaptive_avg_pool2d,
    _aten.upsample_nearest1d,
    _aten.upsample_nearest2d,
    _aten.linalg_vector_norm,
]
"""What PyTorch's compiler keeps, or takes apart elsewhere, and can be taken apart."""


def decomposed(
    node: torch.fx.Node, known: Mapping[str, Any]
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]] | None:
    """The graph of an operator's parts and the nodes that its placeholders stand for; None where PyTorch has none.

    ``known``: what is known of the nodes that it reads, by name; it is taken with its values.
    """
    target: Any = node.target
    unknown = [x for x in node.all_input_nodes if x.name not in known]
    if not isinstance(target, torch._ops.OpOverload) or not all(
        isinstance(x.meta.get("val"), FakeTensor) for x in unknown
    ):
        return None
    place = {x: n for n, x in enumerate(unknown)}

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda x: tensors[place[x]] if x in place else known[x.name]
        )  # pyright: ignore[reportGeneralTypeIssues]
        return target(*args, **kwargs)

    examples = [x.meta["val"] for x in unknown]
    keep = target if operator_name(node) in OPERATORS else None
    try:
        with examples[0].fake_mode, torch.no_grad():
            made = make_fx(
                torch.func.functionalize(call, remove="mutations"),
                decomposition_table=_table(keep),
                _allow_non_fake_inputs=True,
                _error_on_data_dependent_ops=False,
            )(*examples)
    except Exception:  # a decomposition that looks at values, say: there is none then
        return None
    calls = [one for one in made.graph.nodes if one.op == "call_function"]
    if any(one.target == target or "val" not in one.meta for one in calls):
        return None
    return made, unknown


@functools.cache
def _table(also: Any = None) -> Mapping[Any, Any]:
    """PyTorch's decompositions of what has no lowering, and of one operator ``also``."""
    found = {**get_decompositions(_MORE), **dict(core_aten_decompositions().items())}
    return {op: how for op, how in found.items() if named(op) not in OPERATORS or op == also}

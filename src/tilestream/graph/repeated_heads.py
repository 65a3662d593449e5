"""Keys and values of ``scaled_dot_product_attention`` that a model repeats for the queries that share them, not
repeated, in the graph that Dynamo captured.

With a mask PyTorch has few kernels for grouped queries (Ainslie et al. 2023), so models repeat heads. Where the mask
was dropped (``attention_masks``), cuDNN's and flash attention read each head of keys for all of its queries.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from tilestream.graph.attention_masks import SDPA, example_of, give
from tilestream.graph.nodes import argument

WHOLE = slice(None)
RESHAPES = ("reshape", "view")


def share_heads(gm: fx.GraphModule) -> int:
    """Let attention without a mask on a GPU read keys and values that are not repeated, where nothing is trained; how
    many do now.

    Args:
        gm: Dynamo's graph, with ``example_value`` in its nodes' ``meta``; changed in place.
    """
    made = sum(_share(node) for node in gm.graph.nodes if node.op == "call_function" and node.target is SDPA)
    if made:
        gm.recompile()
    return made


def _share(node: fx.Node) -> bool:
    query, key, values = (argument(node, at, name) for at, name in enumerate(("query", "key", "value")))
    fakes = [example_of(x) for x in (query, key, values)]
    if any(f is None or f.device.type != "cuda" or f.dim() != 4 or f.requires_grad for f in fakes):
        return False
    if argument(node, 3, "attn_mask") is not None or argument(node, 4, "dropout_p", 0.0) or fakes[0].itemsize != 2:  # pyright: ignore
        return False
    shared = [_unrepeated(x) for x in (key, values)]
    heads = {f.shape[1] for x in shared if (f := example_of(x)) is not None}
    if None in shared or len(heads) != 1 or argument(node, 7, "enable_gqa", False):
        return False
    give(node, None, key=shared[0], value=shared[1], enable_gqa=True)
    return True


def _unrepeated(node: Any) -> fx.Node | None:
    """Of ``x[:, :, None].expand(b, heads, times, s, f).reshape(b, heads * times, s, f)`` what ``x`` is."""
    expanded: Any = node.args[0] if _calls(node, *RESHAPES) else None
    column: Any = expanded.args[0] if _calls(expanded, "expand") else None
    if not isinstance(column, fx.Node) or column.target is not operator.getitem:
        return None
    x, index = column.args
    whole, wide, one = example_of(x), example_of(expanded), example_of(node)
    if index != (WHOLE, WHOLE, None, WHOLE, WHOLE) or whole is None or wide is None or one is None or whole.dim() != 4:
        return None
    (batch, heads, tokens, features), times = whole.shape, wide.shape[2]
    shapes = (batch, heads, times, tokens, features), (batch, heads * times, tokens, features)
    return x if (tuple(wide.shape), tuple(one.shape)) == shapes else None  # pyright: ignore[reportReturnType]


def _calls(node: Any, *methods: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in methods

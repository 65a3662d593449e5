"""Masks and ranks of ``scaled_dot_product_attention`` as fused kernels take them, in the graph that Dynamo captured.

PyTorch's fused kernels read neighbouring keys of a mask from neighbouring places. Where they lie otherwise, it takes
products of float32 instead, with copies of queries, keys and values. transformers' masks without padding are so, which
are one column expanded, and T5's bias, whose heads come last.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from tilestream.graph.nodes import argument
from tilestream.ir.ways import reached

SDPA = torch.nn.functional.scaled_dot_product_attention
FARTHEST = -(2.0**100)
"""What is less, and finite, is made this, and so is what stands for minus infinity: fused kernels have scores times
log2(e). A power of two, which bfloat16 has as it is: compiled code may round or not."""
ABSORBING = -(2.0**30)
"""What is as large absorbs scores: a row of nothing else has equal weights."""
MOST_KNOWN = 2**24
"""Pairs of a mask that is computed while compiling, where it depends on no argument."""

FUNCTIONS: set[Any] = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.getitem),
    *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne),
    *(operator.and_, operator.or_, operator.xor, operator.invert),
    *(torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu, torch.where),
    *(torch.logical_and, torch.logical_or, torch.logical_not, torch.ones_like, torch.zeros_like),
    *(torch.diff, torch.cumsum),
}
METHODS = {
    *("expand", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "contiguous", "expand_as", "repeat"),
    *("to", "bool", "long", "int", "new_ones", "new_zeros", "new_full", "tril", "triu", "abs", "diff", "cumsum"),
    *("logical_and", "logical_or", "logical_not", "ge", "gt", "le", "lt", "eq", "ne"),
    *("__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__", "__and__", "__or__", "__xor__", "__invert__"),
}
"""What computes the same each time, and writes into no operand. PyTorch 2.11 has some comparisons as methods."""
IN_PLACE: set[Any] = {
    *(operator.setitem, operator.iadd, operator.isub, operator.imul, operator.iand, operator.ior, operator.ixor),
}


def settle_masks(gm: fx.GraphModule) -> int:
    """Give every attention on a GPU a mask that fused kernels take; of how many it was changed.

    A mask that keeps all pairs is dropped, one that is causal becomes ``is_causal``; else its rows are copied where
    their keys do not lie next to each other, once for all layers. A row that keeps no pair is then what it was where
    PyTorch multiplies in float32: zero of a boolean mask or of minus infinity, the mean of values of numbers, however
    large. cuDNN's kernel overflows on the largest ones, and gets another number for a boolean mask.

    Args:
        gm: Dynamo's graph, with ``example_value`` in its nodes' ``meta``; changed in place.
    """
    graph, made = gm.graph, 0
    copies: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    known: dict[fx.Node, str] = {}
    for node in list(graph.nodes):
        if _writes(node):  # perhaps into what a copy was made of, of that dtype
            into = example_of(node.args[0] if node.args else None)
            copies = {k: v for k, v in copies.items() if into is not None and example_of(k[0]).dtype != into.dtype}  # pyright: ignore
        if node.op != "call_function" or node.target is not SDPA:
            continue
        mask: Any = argument(node, 3, "attn_mask")
        query = example_of(argument(node, 0, "query"))
        fake = example_of(mask)
        if fake is None or query is None or query.device.type != "cuda":
            continue
        if mask not in known:
            known[mask] = _kind(mask, fake)
        if known[mask] == "all" or (known[mask] == "causal" and not argument(node, 5, "is_causal")):
            give(node, None, is_causal=known[mask] == "causal" or bool(argument(node, 5, "is_causal")))
        elif fake.stride(-1) == 1 or fake.shape[-1] == 1:
            continue
        else:
            kind = (mask, query.dtype)
            if kind not in copies:
                copies[kind] = _copied(node, mask, fake, query.dtype)
            give(node, copies[kind])
            if any((x := example_of(n)) is not None and x.requires_grad for n in node.all_input_nodes):
                _clear_empty_rows(node, fake.dtype, query.dtype)
        made += 1
    if made:
        # Whatever is no step to a mask stays: Dynamo's graph is not functional.
        graph.eliminate_dead_code(lambda node: not _is_plain(node))
        gm.recompile()
    return made


def example_of(node: Any) -> Tensor | None:
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def give(node: fx.Node, mask: fx.Node | None, **changes: Any) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs, "attn_mask": mask, **changes}
    node.args = tuple(given.pop(name) for name in names[:3])
    node.kwargs = given


def _copied(attention: fx.Node, mask: fx.Node, fake: Tensor, dtype: torch.dtype) -> fx.Node:
    """The mask as rows, of a boolean one what is added to scores. AOTAutograd finds their values."""
    graph = mask.graph
    with graph.inserting_before(attention):
        if fake.dtype is torch.bool:
            given = {"dtype": dtype, "device": fake.device}
            kept, dropped = (graph.call_function(torch.scalar_tensor, (x,), given) for x in (0.0, float("-inf")))
            made = [kept, dropped, graph.call_function(torch.where, (mask, kept, dropped))]
        else:
            far = graph.call_function(torch.isinf, (mask,))
            near = graph.call_function(torch.clamp, (mask,), {"min": _farthest(fake.dtype)})
            made = [far, near, graph.call_function(torch.where, (far, mask, near))]
        made.append(graph.call_method("contiguous", (made[-1],)))
    for node in made:
        node.meta = {k: v for k, v in mask.meta.items() if k != "example_value"}
    return made[-1]


def _farthest(dtype: torch.dtype) -> float:
    return max(FARTHEST, torch.finfo(dtype).min)


def _clear_empty_rows(attention: fx.Node, mask: torch.dtype, dtype: torch.dtype) -> None:
    """In training, let a row without a pair be zero, and one of large negative numbers the mean of values, in a way in
    which a fused kernel finds gradients.

    Such a kernel keeps one number a row, the logarithm of its sum, and has weights from it again. Of minus infinity
    alone it makes no number; of large ones it loses the logarithm of how many there are, and each weight is one. So a
    row of large numbers is moved up to zero, and its query is zero. A mean depends on no query and no key: unlike where
    PyTorch multiplies, they get no gradient of it.

    Args:
        attention: With a mask of rows, as numbers.
        mask: The dtype of the user's mask.
        dtype: The attention's.
    """
    graph: Any = attention.graph
    added = attention.kwargs["attn_mask"]
    query, *others = attention.args
    with graph.inserting_before(attention):
        top = graph.call_function(torch.amax, (graph.call_method("detach", (added,)), -1, True))
        some = graph.call_function(operator.gt, (top, float("-inf")))
        if mask is not torch.bool:
            far = graph.call_function(operator.le, (top, ABSORBING))
            moved = graph.call_function(torch.where, (graph.call_function(operator.and_, (far, some)), top, 0.0))
            added = graph.call_function(operator.sub, (added, moved))
            attention.args = (graph.call_function(torch.where, (far, 0.0, query)), *others)
        finite = graph.call_function(torch.clamp, (added,), {"min": _farthest(dtype)})
    with graph.inserting_after(attention):
        cleared = graph.call_function(torch.where, (some, attention, 0.0))
    give(attention, finite)
    cleared.meta = dict(attention.meta)
    attention.replace_all_uses_with(cleared, delete_user_cb=lambda user: user is not cleared)


def _kind(mask: fx.Node, fake: Tensor) -> str:
    """``all`` or ``causal``: what a boolean mask is that depends on no argument; else nothing."""
    if fake.dtype is not torch.bool or not all(isinstance(n, int) for n in fake.shape):
        return ""
    pairs = prod(n for n, stride in zip(fake.shape, fake.stride(), strict=True) if stride)
    steps = _steps(mask) if pairs <= MOST_KNOWN else None
    if steps is None:
        return ""
    from tilestream.graph.real import real

    with real(torch.device("cpu")):
        found = _computed(steps)[mask]
        if not isinstance(found, Tensor) or found.shape != fake.shape:
            return ""
        # One of what was expanded.
        one = found[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in found.stride())]
        if bool(one.all()):
            return "all"
        rows, keys = found.shape[-2:] if found.dim() > 1 else (0, 1)
        is_causal = rows == keys and bool((one == torch.ones(rows, keys).tril().bool()).all())
        return "causal" if is_causal else ""


def _steps(mask: fx.Node) -> list[fx.Node] | None:
    """All that a mask is computed from, in the order of the graph; None where an argument is among it, or something
    that may be another the next time."""
    found = reached([mask], lambda n: n.all_input_nodes if _is_plain(n) else ())
    if any(not _is_plain(node) or _is_written(node) for node in found):
        return None
    return [node for node in mask.graph.nodes if node in found]


def _is_plain(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in METHODS
    return node.op == "call_function" and node.target in FUNCTIONS and "out" not in node.kwargs


def _is_written(node: fx.Node) -> bool:
    """Whether something may write into it, or into what may be a view of it."""
    return any(_writes(user) or (_is_integer(user) and _is_written(user)) for user in node.users)


def _is_integer(node: fx.Node) -> bool:
    made = example_of(node)
    return made is not None and not made.is_floating_point()


def _writes(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "call_method" and str(node.target).endswith("_") and node.target not in METHODS
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.is_mutable
    owner = getattr(node.target, "__module__", None) or ""
    is_known = node.target not in IN_PLACE and owner.startswith(("torch", "_operator", "math"))
    return "out" in node.kwargs or not (is_known or node.target is SDPA)


def _computed(steps: list[fx.Node]) -> dict[fx.Node, Any]:
    """The values of ``steps``, on the CPU."""
    values: dict[fx.Node, Any] = {}
    for node in steps:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # pyright: ignore
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = node.target(*args, **kwargs)  # pyright: ignore
    return values


def give_ranks(gm: fx.GraphModule) -> int:
    """Let every attention on a GPU that has no mask be of rank 4; of how many it was changed.

    PyTorch's fused kernels take [sequences, heads, tokens, features], and of other ranks it multiplies in float32.
    Windows of timm's Twins have a dimension of their own.

    Args:
        gm: Dynamo's graph, with ``example_value`` in its nodes' ``meta``; changed in place.
    """
    made = sum(_give_rank(node) for node in list(gm.graph.nodes) if node.op == "call_function" and node.target is SDPA)
    if made:
        gm.recompile()
    return made


def _give_rank(node: fx.Node) -> bool:
    names = ("query", "key", "value")
    given: list[Any] = [argument(node, at, name) for at, name in enumerate(names)]
    fakes = [x for n in given if (x := example_of(n)) is not None]
    if len(fakes) < 3 or argument(node, 3, "attn_mask") is not None or any(f.device.type != "cuda" for f in fakes):
        return False
    shapes = [tuple(f.shape) for f in fakes]
    first = shapes[0][:-2]
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    if len(first) in (0, 2) or not known or any(shape[:-2] != first for shape in shapes):
        return False
    sequences, heads = (first[0], 1) if len(first) == 1 else (prod(first[:-1]), first[-1])
    with node.graph.inserting_before(node):
        flat = [_reshaped(n, (sequences, heads, *s[-2:])) for n, s in zip(given, shapes, strict=True)]
    give(node, None, **dict(zip(names, flat, strict=True)))
    with node.graph.inserting_after(node):
        back = _reshaped(node, (*first, shapes[0][-2], shapes[2][-1]))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    back.meta["example_value"] = node.meta["example_value"]
    return True


def _reshaped(node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return node.graph.call_function(torch.reshape, (node, shape))

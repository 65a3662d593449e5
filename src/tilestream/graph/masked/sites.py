"""Attention over the pairs that a mask keeps, as graphs have it: by a block mask, ``flex_attention``'s, or a library's
with a boolean one; and the mask, read off the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.masked.op import MASKED, empty_result
from tilestream.graph.nodes import Unsupported, argument, aten, behind, first_alone, packet, results_of, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.shared_keys import given_to, is_attention, mask_given, scale_of, take_over
from tilestream.graph.sums import constant
from tilestream.kernels.parts.pairs import AXES, DENSE, ELEMENTS, LOAD, MOST_INDICES, OPS, Instruction, PairMask

INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
CONSTANTS = {aten.full: 1, aten.new_full: 2, aten.full_like: 1}
"""Where the value is among the arguments."""
NAMES = {"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor", "rsub": "sub"}
SAME = {aten.clone, aten.alias, aten.detach, aten._to_copy, aten.lift_fresh_copy}


@dataclass(frozen=True)
class ReadMask:
    """``reads``: which of the tensors that a ``mask_mod`` captures the instructions number from zero."""

    mask: PairMask
    reads: tuple[int, ...]


def mask_of(graph: fx.Graph, captured: list[Any]) -> ReadMask:
    """The instructions of a ``mask_mod``, whose placeholders are batch, head, query, key, and what it captures.

    Args:
        captured: nodes or values of the outer graph, in the order of the placeholders.

    Raises:
        Unsupported: an operator or a tensor that has no instruction.
    """
    lines: list[Instruction] = []
    names: dict[fx.Node, str | int] = {}
    reads: dict[fx.Node, int] = {}
    places: list[int] = []

    def add(*instruction: str | int) -> str:
        lines.append(instruction)
        return f"v{len(lines) - 1}"

    def load(node: fx.Node, *indices: str | int) -> str:
        fake = value(captured[reads[node]])
        if fake is None or fake.dim() != len(indices) or fake.dim() > MOST_INDICES or str(fake.dtype) not in ELEMENTS:
            raise Unsupported("its mask reads other tensors than integers by an index for each dimension")
        if reads[node] not in places:
            places.append(reads[node])
        return add(LOAD, places.index(reads[node]), *indices)

    def operand(x: Any) -> str | int:
        if isinstance(x, fx.Node):
            return load(x) if x in reads else names[x] if x in names else _refuse(x)
        return int(x) if isinstance(x, int) else _refuse(x)

    for k, node in enumerate(graph.find_nodes(op="placeholder")):
        if k < len(AXES):
            names[node] = AXES[k]
        else:
            reads[node] = k - len(AXES)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        op, fake = packet(node), value(node)
        if fake is None or fake.dtype not in INTEGERS or fake.dim():
            _refuse(node)
        if op in SAME:
            names[node] = operand(node.args[0])
        elif op in CONSTANTS:
            names[node] = add("constant", operand(node.args[CONSTANTS[op]]))
        elif op in (aten.ones_like, aten.new_ones, aten.ones):
            names[node] = add("constant", 1)
        elif op is aten.index:
            source, indices = node.args
            names[node] = load(source, *map(operand, indices)) if source in reads else _refuse(node)
        else:
            names[node] = add(*_plain(node, [operand(x) for x in node.args]))
    given = results_of(graph)
    last = operand(given[0] if isinstance(given, list | tuple) else given)
    if last != f"v{len(lines) - 1}":
        add("constant", last)
    return ReadMask(PairMask(tuple(lines)), tuple(places))


def _plain(node: fx.Node, operands: list[str | int]) -> Instruction:
    """An operator over integers.

    Raises:
        Unsupported: it is none.
    """
    name, modes = packet(node).__name__, {k: v for k, v in node.kwargs.items() if v is not None}
    if name == "div" and modes == {"rounding_mode": "floor"}:
        name, modes = "floor_divide", {}
    if name == "bitwise_not" and value(node).dtype is torch.bool:  # pyright: ignore[reportOptionalMemberAccess]
        name = "logical_not"
    if name.startswith("logical_") and any(_is_wide(x) for x in node.args):
        _refuse(node)
    if name == "rsub":
        operands = operands[::-1]
    name = NAMES.get(name, name)
    if name not in OPS or modes or len(operands) != OPS[name].count("{}") + (name in ("abs", "minimum", "maximum")):
        _refuse(node)
    return (name, *operands)


def _is_wide(x: Any) -> bool:
    fake = value(x)
    return fake is not None and fake.dtype is not torch.bool


def _refuse(x: Any) -> Any:
    what = str(x.target) if isinstance(x, fx.Node) else repr(x)
    raise Unsupported(f"its mask has {what} in it, which is no integer arithmetic")


def boolean_mask(bias: fx.Node) -> fx.Node | None:
    """The bool mask that was made an additive one, zero where it is true and minus infinity elsewhere; else None."""
    node = behind(bias, lambda n: packet(n) in (aten.expand, *SAME) or _keeps_beginning(n))
    if packet(node) is not aten.where or len(node.args) != 3:
        return None
    condition, kept, dropped = node.args
    fake = value(condition)
    is_bool = fake is not None and fake.dtype is torch.bool
    is_mask = is_bool and constant(kept) == 0.0 and constant(dropped) == float("-inf")
    return condition if is_mask and isinstance(condition, fx.Node) else None


def _keeps_beginning(node: fx.Node) -> bool:
    """Whether it pads at the end of dimensions, as kernels want a mask's rows, or cuts an end off."""
    if packet(node) is aten.constant_pad_nd:
        return not any(node.args[1][::2])  # pyright: ignore
    start, step = argument(node, 2, "start"), argument(node, 4, "step", 1)
    return packet(node) is aten.slice and start in (None, 0) and step == 1


FEATURES = range(16, 129, 16)
BLOCK = 128
"""Queries and keys of a block that is looked at as one; a ``BlockMask``'s blocks are multiples of it."""
MOST_KEYS = 2**17
"""States of a CTA's tiles lie in shared memory."""
MOST_PAIRS = 2**31
"""Of all masks that differ: each is a bit while a call lasts."""
LEAST_QUERIES = 16
"""A tile has 64: with fewer than this most of it is empty, and kernels that split the keys are faster (decoding)."""
FLEX = "flex_attention"


@dataclass(frozen=True)
class Site:
    """An attention that may be ``MASKED``.

    Args:
        operands: query, key and value.
        blocks, read: nodes of the lists of blocks, none where all are looked at, and of what the mask reads.
        differs: batches and heads for which the mask is different, or 1.
        boolean: the mask of pairs, which is read as four dimensions; None of a block mask.
    """

    node: fx.Node
    operands: tuple[fx.Node, fx.Node, fx.Node]
    blocks: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]
    mask: PairMask
    block: tuple[int, ...]
    differs: tuple[int, int]
    scale: float
    boolean: fx.Node | None = None


def is_masked(node: fx.Node) -> bool:
    """Whether a node is an attention with a mask that says which pairs are kept."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == FLEX:
        return True
    return is_attention(node) and _boolean(node) is not None


def site_of(node: fx.Node) -> Site:
    """What an attention of ``is_masked`` is.

    Raises:
        Unsupported: our kernel cannot do it; why.
    """
    made = _flex(node) if getattr(node.target, "__name__", "") == FLEX else _library(node)
    query, key, values = (_sized(n) for n in made.operands)
    batch, heads, queries, features = query.shape
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(
            f"attention in {str(query.dtype).removeprefix('torch.')}: our kernel's products are of 16 bits"
        )
    if key.shape != values.shape or features not in FEATURES or key.shape[3] != features:
        raise Unsupported("heads of other widths than multiples of 16 up to 128")
    if key.shape[0] != batch or heads % key.shape[1] or not 0 < key.shape[2] <= MOST_KEYS or not made.scale > 0:
        raise Unsupported(f"keys {list(key.shape)} for queries {list(query.shape)}")
    if queries < LEAST_QUERIES:
        raise Unsupported(f"{queries} queries: a tile of our kernel has 64, and would be all but empty")
    if made.differs[0] * made.differs[1] * queries * key.shape[2] > MOST_PAIRS:
        raise Unsupported("masks of more pairs than a call should hold bits for")
    if not first_alone(node):
        raise Unsupported("more of it is used than the result, as in training")
    return made


def _sized(node: Any) -> Tensor:
    fake = value(node)
    if fake is None or fake.dim() != 4 or not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
        raise Unsupported("attention with symbolic sizes")
    return fake


def _flex(node: fx.Node) -> Site:
    given: Any = node.args
    if len(given) != 9 or node.kwargs:
        raise Unsupported("flex_attention of another PyTorch")
    query, key, values, score, blocks, scale, _, _, others = given
    some, listed, all_, all_listed = blocks[2:6]
    *_, rows, keys, mask = blocks
    owner: Any = node.graph.owning_module
    if not _returns_first(getattr(owner, score.target).graph):
        raise Unsupported("a score_mod: Inductor writes it into its kernel")
    if not isinstance(rows, int) or not isinstance(keys, int) or rows % BLOCK or keys % BLOCK:
        raise Unsupported(f"a block mask's blocks of {rows} x {keys}, which are no multiples of {BLOCK}")
    (batch, heads, queries, _), of = _sized(query).shape, _sized(listed).shape
    if any(m not in (1, n) for n, m in zip((batch, heads), of, strict=False)) or of[2] * rows < queries:
        raise Unsupported(f"a block mask {list(of)} for queries {list(_sized(query).shape)}")
    found = mask_of(getattr(owner, mask.target).graph, list(others))
    differs = tuple(n if found.mask.names(axis) else m for axis, n, m in zip(AXES, (batch, heads), of, strict=False))
    lists = (some, listed) if all_ is None else (some, listed, all_, all_listed)
    read = tuple(others[k] for k in found.reads)
    return Site(node, (query, key, values), lists, read, found.mask, (rows, keys), (differs[0], differs[1]), scale)


def _returns_first(graph: fx.Graph) -> bool:
    """Whether a ``score_mod`` is none."""
    first, given = graph.find_nodes(op="placeholder")[0], results_of(graph)
    return (given[0] if isinstance(given, list | tuple) else given) is first


def _boolean(node: fx.Node) -> fx.Node | None:
    bias = mask_given(given_to(node))
    return boolean_mask(bias) if isinstance(bias, fx.Node) else None


def _library(node: fx.Node) -> Site:
    given = given_to(node)
    query, key, values = (given[n] for n in ("query", "key", "value"))
    if given.get("is_causal") or given.get("dropout_p"):
        raise Unsupported("attention with dropout, or causal besides its mask")
    kept = _boolean(node)
    fake, shape = value(kept), _sized(query).shape
    wanted = (*shape[:2], shape[2], _sized(key).shape[2])
    if kept is None or fake is None or fake.dim() > 4 or not all(isinstance(n, int) for n in fake.shape):
        raise Unsupported("a mask with symbolic sizes")
    sizes = (*[1] * (4 - fake.dim()), *fake.shape)
    if any(n not in (1, m) for n, m in zip(sizes, wanted, strict=True)):
        raise Unsupported(f"a mask {list(sizes)} for pairs {list(wanted)}")
    return Site(node, (query, key, values), (), (), DENSE, (), (sizes[0], sizes[1]), scale_of(node), kept)


def place(site: Site) -> bool:
    """Put ``MASKED`` in the place of an attention; whether its result can lie as views of it want it."""
    node = site.node
    before = node.meta["val"][0]
    shape = before.shape
    by_token = before.stride() == empty_result(before, by_token=True).stride()
    if not by_token and not before.is_contiguous():
        return False
    with node.graph.inserting_before(node):
        read = list(site.read)
        if site.boolean is not None:
            sizes = [*site.differs, shape[2], value(site.operands[1]).shape[2]]  # pyright: ignore
            read = [call(node, aten.expand.default, site.boolean, sizes)]
        lists, block, differs = list(site.blocks), list(site.block), list(site.differs)
        made = call(node, MASKED, *site.operands, lists, read, site.mask.text, block, differs, site.scale, by_token)
    take_over(node, made)
    return True

"""The mask of an attention, read off a graph: ``flex_attention``'s ``mask_mod``, or a library's boolean mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, argument, aten, behind, packet, results_of, value
from tilestream.kernels.parts.pairs import AXES, ELEMENTS, LOAD, MOST_INDICES, OPS, Instruction, PairMask

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
    is_mask = is_bool and _filled_with(kept) == 0.0 and _filled_with(dropped) == float("-inf")
    return condition if is_mask and isinstance(condition, fx.Node) else None


def _keeps_beginning(node: fx.Node) -> bool:
    """Whether it pads at the end of dimensions, as kernels want a mask's rows, or cuts an end off."""
    if packet(node) is aten.constant_pad_nd:
        return not any(node.args[1][::2])  # pyright: ignore
    start, step = argument(node, 2, "start"), argument(node, 4, "step", 1)
    return packet(node) is aten.slice and start in (None, 0) and step == 1


def _filled_with(node: Any) -> float | None:
    if isinstance(node, int | float):
        return float(node)
    if isinstance(node, fx.Node) and packet(node) in (aten.full, aten.scalar_tensor):
        given = node.args[1 if packet(node) is aten.full else 0]
        return float(given) if isinstance(given, int | float) else None
    return None

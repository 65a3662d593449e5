"""What is left of a graph, as kernels of libraries and of Inductor.

A matrix product, a convolution and an attention are a kernel each. Other operators that follow each other are one:
Inductor fuses them. A kernel reads its operands from DRAM and writes its results there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tilestream.graph import flops
from tilestream.graph.nodes import computes, is_view, packet
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES

aten = torch.ops.aten

_GATHERS = {aten.index, aten.index_select, aten.gather, aten.embedding, aten._embedding_bag, aten.embedding_bag}
"""Operators that read as much of their first operand as they write."""


@dataclass(frozen=True)
class Kernel:
    """``flops`` of products, in ``dtype`` (bf16, f16, f32, float64), and ``bytes`` between DRAM and the chip."""

    flops: float
    dtype: str
    bytes: float

    def scaled(self, factor: float) -> Kernel:
        """The same for ``factor`` times the rows: weights count for nothing beside them."""
        return replace(self, flops=self.flops * factor, bytes=self.bytes * factor)


def kernels(nodes: Sequence[fx.Node], elsewhere: Collection[fx.Node] = ()) -> tuple[Kernel, ...]:
    """The kernels of the operators among ``nodes``, which are in graph order, but for those that run ``elsewhere``."""
    amount = {n: flops.of_node(n) for n in nodes if computes(n)}
    alone = {n for n, flop in amount.items() if flop} | set(elsewhere)
    depth = _depths(list(amount), alone)
    groups: dict[fx.Node, list[fx.Node]] = {}
    leader: dict[fx.Node, fx.Node] = {}
    for node in amount:
        if node in elsewhere:
            continue
        leader[node] = node
        groups[node] = [node]
        for other in () if node in alone else _operands(node):
            fused = other in leader and other not in alone and depth[other] == depth[node]
            if fused and leader[other] is not node:
                old = groups.pop(leader[other])
                groups[node] += old
                leader.update(dict.fromkeys(old, node))
    return tuple(_kernel(group, amount) for group in groups.values())


def _depths(nodes: Sequence[fx.Node], alone: Collection[fx.Node]) -> dict[fx.Node, int]:
    """How many kernels of those ``alone`` come before each operator, as late as its readers allow.

    One kernel cannot run both before and after another, so only operators of one depth are fused.
    """
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        depth[node] = max((depth[n] for n in _operands(node) if n in depth), default=0) + (node in alone)
    for node in reversed(nodes):
        readers = _users(node)
        if node not in alone and readers and all(r in depth for r in readers):
            depth[node] = max(depth[node], min(depth[r] - (r in alone) for r in readers))
    return depth


def _kernel(group: list[fx.Node], amount: dict[fx.Node, int]) -> Kernel:
    inside = set(group)
    moved = 0.0
    outer: dict[fx.Node, float] = {}
    for node in group:
        written = bytes_of(node.meta.get("val"))
        if any(user not in inside for user in _users(node)):
            moved += written
        for position, operand in enumerate(_operands(node)):
            if operand not in inside:
                read = bytes_of(operand.meta.get("val"))
                gathers = packet(node) in _GATHERS and position == 0
                outer[operand] = max(outer.get(operand, 0.0), min(read, written) if gathers else read)
    return Kernel(sum(amount[n] for n in group), dtype_of(group[0].meta.get("val")), moved + sum(outer.values()))


def _operands(node: fx.Node) -> list[fx.Node]:
    """Nodes whose values ``node`` reads: views stand for what they show."""
    return list(dict.fromkeys(_base(n) for n in node.all_input_nodes))


def _base(node: fx.Node) -> fx.Node:
    while is_view(node) or (node.op == "call_function" and not computes(node) and node.all_input_nodes):
        node = node.all_input_nodes[0]
    return node


def _users(node: fx.Node) -> list[fx.Node]:
    """Operators and outputs that read the value of ``node``, perhaps through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _users(user) if user.op == "call_function" and not computes(user) else [user]
    return found


def bytes_of(value: object) -> float:
    """Bytes of all tensors in ``value``, which may be fake and have symbolic sizes."""
    return float(
        sum(
            prod(hint(d) for d in x.shape) * x.element_size() for x in tree_leaves(value) if isinstance(x, torch.Tensor)
        )
    )


def dtype_of(value: object) -> str:
    """The dtype of the first floating-point tensor in ``value``: f32 where there is none, torch's name of others."""
    floating = (x.dtype for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point())
    dtype = next(floating, torch.float32)
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))

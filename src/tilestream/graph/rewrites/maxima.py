"""Maxima over the rows that a linear layer makes, in two steps: a kernel has 16 rows in a warp."""

from __future__ import annotations

import torch
from torch import fx

from tilestream.graph.nodes import MATMULS, argument, aten, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.ir.tileops import GROUP


@each(aten.amax)
def split_maxima(node: fx.Node, _: Settings) -> fx.Node | None:
    """``amax`` over the rows of what a linear makes becomes one over every 16 rows, which a kernel has in a warp, and
    one over what is left: ``[n, p, f]`` to ``[n, p / 16, f]`` to ``[n, f]``. Which is the same, in any order."""
    x = node.args[0]
    fake = value(x)
    if fake is None or not isinstance(x, fx.Node) or not _can_split(node, x):
        return None
    points, features = fake.shape[-2:]
    shape = [-1 if fake.dim() == 3 else fake.shape[0], *fake.shape[1:-2], points // GROUP, GROUP, features]
    grouped = call(node, aten.view.default, x, shape)
    node.update_arg(0, call(node, aten.amax.default, grouped, [fake.dim() - 1]))
    return node


@each(aten.amax)
def join_maxima(node: fx.Node, _: Settings) -> fx.Node | None:
    """Undo ``split_maxima`` where no region has taken the first half."""
    most = node.args[0]
    if not isinstance(most, fx.Node) or not is_of_groups(most) or len(most.users) > 1:
        return None
    (grouped,) = most.all_input_nodes
    node.update_arg(0, grouped.args[0])
    return node


def is_of_groups(node: fx.Node) -> bool:
    """Whether ``node`` is the first of two maxima that ``split_maxima`` made of one."""
    grouped = node.args[0] if packet(node) is aten.amax and node.args else None
    if not isinstance(grouped, fx.Node) or packet(grouped) is not aten.view:
        return False
    fake = value(grouped)
    return fake is not None and fake.dim() > 3 and fake.shape[-2] == GROUP and list(node.args[1:]) == [[fake.dim() - 2]]


def _can_split(node: fx.Node, x: fx.Node) -> bool:
    fake, dims = value(x), argument(node, 1, "dim", [])
    if fake is None or fake.dim() < 3 or not fake.is_contiguous() or fake.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not isinstance(dims, list | tuple) or [d % fake.dim() for d in dims if isinstance(d, int)] != [fake.dim() - 2]:
        return False
    if not all(isinstance(n, int) for n in (fake.shape[1:] if fake.dim() == 3 else fake.shape)):
        return False
    points, features = fake.shape[-2:]
    return points % GROUP == 0 and points > GROUP and features % 64 == 0 and _is_made_by_linear(x)


def _is_made_by_linear(node: fx.Node) -> bool:
    """Whether ``node`` is a linear's result, under any view, and with ops of one operand behind it."""
    while packet(node) not in MATMULS:
        tensors = [a for a in node.all_input_nodes if value(a) is not None]
        if node.op != "call_function" or len(tensors) != 1 or packet(node) in (aten.slice, aten.select):
            return False
        node = tensors[0]
    return True

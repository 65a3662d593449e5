"""Puts our operators in the place of an interaction, and of its gradient where the graph has that too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tilestream.graph.interaction.op import INTERACTION, INTERACTION_BACKWARD
from tilestream.graph.interaction.sites import Interaction, Vector
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.insert import call
from tilestream.graph.settled import settle


def place(owner: fx.GraphModule, site: Interaction) -> bool:
    """Replace a site, always, by ``tilestream::interaction``, and its gradient by ``tilestream::interaction_backward``.

    Rows of results are padded with zeros to 16 bytes, so that what reads them may do so in bulk: users get a slice.
    """
    _place(owner.graph, site)
    settle(owner)
    return True


def unpadded(node: fx.Node) -> fx.Node | None:
    """The rows with their zeros, where a node is an interaction's result without them."""
    whole = longer(node)
    return whole if whole is not None and whole.target is INTERACTION else None


def longer(node: fx.Node) -> fx.Node | None:
    """The matrix of which a node is the first columns."""
    if packet(node) is not aten.slice or node.args[1:3] != (1, 0) or len(node.args) > 4:
        return None
    whole = node.all_input_nodes[0]
    return whole if whole.meta["val"].dim() == 2 else None


def _place(graph: fx.Graph, site: Interaction) -> None:
    made = site.result
    with graph.inserting_before(made):
        sources, indices = _operands(site.vectors)
        pairs = tuple(_moved(n, made.meta["val"].device) for n in (site.first, site.second))
        result = call(made, INTERACTION, sources, indices, *pairs, site.head)
        wanted = made.meta["val"].shape[1]
        whole = result
        if result.meta["val"].shape[1] != wanted:
            result = call(made, aten.slice.Tensor, whole, 1, 0, wanted)
    made.replace_all_uses_with(result)
    if site.gradient is None:
        return
    if result is not whole:
        _save_whole(result, whole)
    total = site.gradient.total
    with graph.inserting_before(total):
        rows = call(total, INTERACTION_BACKWARD, sources, indices, *pairs, site.gradient.given)
    for user in list(total.users):
        if packet(user) is aten.select and user.args[1] in (1, -2):
            with graph.inserting_before(user):
                user.replace_all_uses_with(call(user, aten.select.int, rows, 0, user.args[2]))
    if any(packet(user) is not aten.select or user.users for user in total.users):
        with graph.inserting_before(total):
            turned = call(total, aten.permute.default, rows, [1, 0, 2])
            whole = call(total, aten.clone.default, turned, memory_format=torch.contiguous_format)
        total.replace_all_uses_with(whole)


def _save_whole(part: fx.Node, whole: fx.Node) -> None:
    """A weight's gradient takes rows with their zeros: so these are what is saved, and can be read in bulk."""
    for product in list(part.users):
        if packet(product) is not aten.mm or product.args[1] is not part:
            continue
        with product.graph.inserting_before(product):
            wide = call(product, aten.mm.default, product.args[0], whole)
            bounds = (1, 0, part.meta["val"].shape[1])
            product.replace_all_uses_with(call(product, aten.slice.Tensor, wide, *bounds))


def _operands(vectors: Sequence[Vector]) -> tuple[list[fx.Node], list[fx.Node | None]]:
    """Of each vector its rows and its index; equal steps from one node are taken once."""
    made: dict[tuple[fx.Node, tuple], fx.Node] = {}

    def stepped(node: fx.Node, vector: Vector) -> fx.Node:
        if (node, vector.steps) not in made:
            step = node
            for target, args in vector.steps:
                step = call(node, target, step, *args)
            made[node, vector.steps] = step
        return made[node, vector.steps]

    sources = [v.rows if v.index is not None else stepped(v.rows, v) for v in vectors]
    return sources, [None if v.index is None else stepped(v.index, v) for v in vectors]


def _moved(node: fx.Node, device: torch.device) -> fx.Node:
    """An index of the CPU's where it is needed, as PyTorch copies it."""
    return node if node.meta["val"].device == device else call(node, aten._to_copy.default, node, device=device)

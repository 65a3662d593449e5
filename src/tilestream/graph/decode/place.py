"""Puts the operator in the place of a decode step."""

from __future__ import annotations

from torch import fx

from tilestream.graph.decode.op import STEP
from tilestream.graph.decode.site import Site
from tilestream.graph.nodes import Unsupported, aten
from tilestream.graph.rewrites.insert import call
from tilestream.graph.settled import settle


def place(owner: fx.GraphModule, site: Site) -> None:
    """Compute the logits of ``site`` by one operator, which writes the caches, and counts, itself.

    ``owner`` is changed in place.

    Raises:
        Unsupported: something else of the step is read too, and would be computed twice.
    """
    node = site.logits
    operands = [site.row, site.cos, site.sin, site.mask, site.weights, site.caches, site.lengths]
    with owner.graph.inserting_before(node):
        numbers = (site.scale, site.eps, site.head_eps, site.times)
        made = call(node, STEP, *operands, site.shape.form.text, bool(site.counts), *numbers)
        if made.meta["val"].shape != node.meta["val"].shape:
            made = call(node, aten.view.default, made, list(node.meta["val"].shape))
    node.replace_all_uses_with(made)
    written = [u for update in site.updates for u in update.users if u.target is aten.copy_.default]
    for copy in (*written, *site.counts):
        owner.graph.erase_node(copy)
    settle(owner)
    left = set(owner.graph.nodes)
    for update in site.updates:
        if update in left:
            raise Unsupported("something behind the step reads its caches", update)

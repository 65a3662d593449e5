"""Derivatives of activations of wide layers, saved in the place of what was activated.

    forward   h = act(x), d = act'(x)          backward   dx = dh d

GELU's derivative takes 20 instructions and more an element. Behind a product that is computed in tiles nothing hides
them, while one multiplication is an epilogue; in the forward graph, where x is read for act(x), a kernel that waits for
memory has them beside it. Of d as of x 16 bits are saved. H200, predicted, 12,608 rows of 192-768 (ViT-tiny's dh and
dx): a product and a kernel behind it 32.5 us; one kernel with the derivative 27.4, with the multiplication 16.2.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import arguments, aten, behind, is_product, is_view, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import settled

SAVED = "tilestream.saved"
"""In the ``meta`` of what the forward graph computes for the backward graph (``graph.cut``)."""
DERIVATIVES = {aten.gelu_backward: aten.gelu, aten.silu_backward: aten.silu}
"""Of a gradient and what was activated; linear in the gradient."""


@each(*DERIVATIVES)
def save_derivatives(node: fx.Node, _: Settings) -> fx.Node | None:
    """Where the gradient is a product's result that nobody else reads, of more columns than a row stream holds, and
    nobody but the activation and its derivative reads what was activated."""
    gradient, x = arguments(node)[:2]
    act = next((u for u in x.users if packet(u) is DERIVATIVES[packet(node)]), None)
    if act is None or len(x.users) != 2 or not _is_wide(x) or not _of_a_product(gradient):
        return None
    if any("recompute" in n.meta for n in (x, act)):  # under activation checkpointing the user says what is saved
        return None
    with node.graph.inserting_before(act):
        ones = call(act, aten.ones_like.default, x)
        slope = call(act, node.target, ones, x, **node.kwargs)
    slope.meta |= {SAVED: True, "recompute": CheckpointPolicy.MUST_SAVE}
    return call(node, aten.mul.Tensor, gradient, slope)


def _is_wide(x: fx.Node) -> bool:
    made = value(x)
    columns = settled(made.shape[-1]) if made is not None and made.dim() > 1 and made.element_size() == 2 else 0
    return isinstance(columns, int) and columns > MAX_FEATURES


def _of_a_product(node: fx.Node) -> bool:
    made = behind(node, lambda n: is_view(n) and len(n.users) == 1)
    return is_product(made) and len(made.users) == 1

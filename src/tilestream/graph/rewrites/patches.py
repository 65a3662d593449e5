"""Embeddings of patches in training: the layer and its gradients as products of the same rows (``graph.patches``)."""

from __future__ import annotations

from torch import fx

from tilestream.graph.convolutions import FIRST, LAST
from tilestream.graph.nodes import arguments, aten, packet
from tilestream.graph.patches import Site, matrix_of, put_in_place, sites
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings


def multiply_patches(graph: fx.Graph, _: Settings) -> int:
    """Convolutions of patches and their gradients become products of the same rows, in a joint graph; how many did.

    Of pictures alone, that is of channels that are no multiple of 16 bytes, whose gradient nobody wants: for those
    cuDNN pads and turns pictures twice.
    """
    return sum(_multiply(graph, site) for site in sites(graph))


def _multiply(graph: fx.Graph, site: Site) -> bool:
    patches = site.patches
    x, weight, bias = arguments(site.node)[:3]
    readers = [n for n in x.users if packet(n) is aten.convolution_backward and n.args[1] is x and n.args[2] is weight]
    if len(readers) != 1 or readers[0].args[-1][0] or patches.channels * x.meta["val"].element_size() % 16 == 0:  # pyright: ignore
        return False

    def flat(like: fx.Node, rows: fx.Node) -> fx.Node:
        return call(like, aten.view.default, rows, [-1, patches.features])

    def layer(rows: fx.Node) -> fx.Node:
        node = site.node
        turned = call(node, aten.t.default, matrix_of(site))
        product = (aten.mm.default,) if bias is None else (aten.addmm.default, bias)
        made = call(node, *product, flat(node, rows), turned)
        return call(node, aten.view.default, made, [-1, *patches.grid, patches.out])

    cut = put_in_place(graph, site, layer)
    if cut is None:
        return False
    back = readers[0]
    with graph.inserting_before(back):
        by_pixel = call(back, aten.permute.default, back.args[0], LAST)
        rows = call(back, aten.reshape.default, by_pixel, [-1, patches.out])
        matrix = call(back, aten.mm.default, call(back, aten.t.default, rows), flat(back, cut))
        made = {1: call(back, aten.view.default, matrix, patches.kernel_shape)}
        if patches.last[1]:
            made[1] = call(back, aten.permute.default, made[1], FIRST)
        if back.args[-1][2]:  # pyright: ignore
            made[2] = call(back, aten.sum.dim_IntList, rows, [0])
    for reader in list(back.users):
        if reader.users:
            reader.replace_all_uses_with(made[reader.args[1]])  # pyright: ignore
    return True

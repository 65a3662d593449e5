"""Two layers over the tokens of images, as MLP-Mixer has them: an operator of ours that turns no image.

``x + linear2(act(linear1(norm(x).transpose(1, 2)))).transpose(1, 2)``. Libraries multiply rows of what lies side by
side, so images are copied with their tokens side by side, and their results back. ``site_of`` finds such layers, and
``place`` puts the operator there.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from tilestream.graph.lying import elsewhere
from tilestream.graph.nodes import (
    RESHAPES,
    argument,
    aten,
    first_alone,
    is_view,
    keeps_features,
    packet,
    permutation,
    value,
)
from tilestream.graph.own import activated, activation_of, operator
from tilestream.graph.rewrites.insert import call
from tilestream.graph.settled import settle
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.token_mixing import ACTIVATIONS, Mixing

TURNED = [0, 2, 1]


def token_mixing(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    normed: bool,
    residual: Tensor | None,
) -> Tensor:
    """Images ``[images, tokens, channels]`` behind two layers over their tokens; ``residual`` is added.

    Sums are fp32 (fp64 of fp64). What the norm and the first layer make is rounded to the dtype of ``x``, as is the
    result.

    Args:
        x, residual: [images, tokens, channels], of bf16 or f16 like all but ``eps``.
        gamma, beta: [channels] of a LayerNorm of each token, which is in front with ``normed``.
        w1: [hidden, tokens]; b1: [hidden]. w2: [tokens, hidden]; b2: [tokens].
        activation: one of ``ACTIVATIONS``.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32

    def rounded(t: Tensor) -> Tensor:
        return t.to(x.dtype).to(wide)

    given: Any = (None if t is None else t.to(wide) for t in (gamma, beta, w1, b1, w2, b2, residual))
    gamma, beta, first, b1, second, b2, added = given
    rows = x.to(wide)
    if normed:
        rows = rounded(functional.layer_norm(rows, rows.shape[2:], gamma, beta, eps))
    hidden = functional.linear(rows.transpose(1, 2), first, b1)
    made = functional.linear(rounded(activated(activation, hidden)), second, b2).transpose(1, 2)
    return (made if added is None else made + added).to(x.dtype).contiguous()


Layer = tuple[fx.Node, fx.Node | None]
"""A weight and its bias."""
TOKEN_MIXING = operator(token_mixing, lambda x, *_: x.new_empty(x.shape), "token_mixing:mixed")


@dataclass(frozen=True)
class Site:
    """Layers that may be the operator: ``node`` is the value that it makes, ``x`` what it reads.

    Attributes:
        images: about how many there are. norm: in front of the layers. first, second: their weight and bias.
    """

    node: fx.Node
    mixing: Mixing
    images: int
    x: fx.Node
    norm: fx.Node | None
    first: Layer
    second: Layer
    residual: fx.Node | None


def sites(graph: fx.Graph) -> list[Site]:
    """Those of an inference graph, none inside of another."""
    found: list[Site] = []
    taken: set[object] = set()
    for node in reversed(graph.nodes):
        if node not in taken and (site := site_of(node)) is not None:
            found.append(site)
            taken.update(node.args)
    return found[::-1]


def site_of(node: fx.Node) -> Site | None:
    """What ``node`` is, if it is two layers over tokens, with or without what is added, that our kernel computes."""
    given = node.args[:2] if _adds(node) else ()
    pairs = [(given[1], given[0]), (given[0], given[1])] if len(given) == 2 else [(node, None)]
    for turned, residual in pairs:
        if isinstance(turned, fx.Node) and (found := _layers(node, turned, residual)) is not None:
            return found
    return None


def _layers(node: fx.Node, turned: fx.Node, residual: Any) -> Site | None:
    back = _turned(turned, node)
    second = None if back is None else _linear(back)
    act = None if second is None else _alone(second[0])
    first = None if act is None or activation_of(act) not in ACTIVATIONS else _linear(act.args[0])
    forth = None if first is None else _alone(first[0])
    x = None if forth is None else _turned(forth)
    if act is None or first is None or second is None or x is None:
        return None
    norm, before = None, x.args[0] if x.target is getitem else None
    if isinstance(before, fx.Node) and packet(before) is aten.native_layer_norm and first_alone(before):
        if len(before.users) == len(x.users) == 1 and isinstance(before.args[0], fx.Node):
            norm, x = before, before.args[0]
    return _fitting(node, x, norm, first[1:], second[1:], residual, activation_of(act))


def _fitting(
    node: fx.Node, x: fx.Node, norm: fx.Node | None, first: Layer, second: Layer, residual: Any, activation: str
) -> Site | None:
    """The site, if all sizes and dtypes are those of a kernel."""
    vectors = (first[1], second[1], residual, *(norm.args[2:4] if norm is not None else ()))
    fakes = [value(n) for n in (x, first[0], second[0], node, *(n for n in vectors if n is not None))]
    fake, w1, w2 = fakes[:3]
    if fake is None or w1 is None or w2 is None or fake.dtype not in (torch.bfloat16, torch.float16) or fake.dim() != 3:
        return None
    if any(f is None or f.dtype != fake.dtype for f in fakes) or (residual and value(residual).shape != fake.shape):  # pyright: ignore
        return None
    (images, tokens, channels), hidden = fake.shape, w1.shape[0]
    if not all(isinstance(n, int) for n in (tokens, channels, *w1.shape, *w2.shape)):
        return None
    if tuple(w1.shape) != (hidden, tokens) or tuple(w2.shape) != (tokens, hidden):
        return None
    if norm is not None and argument(norm, 1, "normalized_shape") != [channels]:
        return None
    mixing = Mixing(tokens, hidden, channels, DTYPES[fake.dtype], norm is not None, residual is not None, activation)
    return Site(node, mixing, hint(images), x, norm, first, second, residual) if mixing.taken else None


def _alone(node: object) -> fx.Node | None:
    """What a node shows, in another shape of the same features or copied, if nobody else reads any of them."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if packet(node) is not aten.clone and not (packet(node) in RESHAPES and keeps_features(node)):
            return node
        node = node.args[0]
    return None


def _turned(node: fx.Node, last: fx.Node | None = None) -> fx.Node | None:
    """What is turned, tokens for channels, where ``node`` is that; ``last`` may have any users."""
    found = permutation(node) == TURNED and (node is last or len(node.users) == 1)
    return node.args[0] if found and isinstance(node.args[0], fx.Node) else None


def _linear(node: Any) -> tuple[Any, fx.Node, fx.Node | None] | None:
    """What a layer reads, its weight and its bias, where ``node`` is one that nobody else reads."""
    made, bias = _alone(node), None
    if made is not None and _adds(made) and _is_vector(made.args[1]):
        bias, made = made.args[1], _alone(made.args[0])
    if made is None or made.kwargs:
        return None
    kind, given = packet(made), list[Any](made.args)
    if kind is aten.linear and bias is None:
        return given[0], given[1], given[2] if len(given) > 2 else None
    if kind is aten.addmm and bias is None and _is_vector(given[0]):
        bias = given.pop(0)
    elif kind is not aten.mm:
        return None
    return (given[0], given[1].args[0], bias) if permutation(given[1]) == [1, 0] else None  # pyright: ignore


def _adds(node: fx.Node) -> bool:
    return packet(node) is aten.add and argument(node, 2, "alpha", 1) == 1


def _is_vector(node: Any) -> bool:
    fake = value(node)
    return fake is not None and fake.dim() == 1


def place(owner: fx.GraphModule, site: Site) -> bool:
    """Put the operator in the place of a site; whether it was. A result lies with its channels side by side, which its
    readers must be able to do with: where one is returned as it lay, or is looked at as it cannot be, layers stay."""
    graph, node, fake = owner.graph, site.node, site.node.meta["val"]
    changed = elsewhere(graph, node, fake.contiguous())
    if changed is None:
        return False
    with graph.inserting_before(node):
        x = _rows(site.x)
        same = site.residual is not None and _shows(site.residual) == _shows(site.x)
        residual = x if same else site.residual and _rows(site.residual)
        gamma, beta, eps = site.norm.args[2:5] if site.norm is not None else (None, None, 0.0)
        layers = (*site.first, *site.second, site.mixing.activation, site.mixing.normed)
        made = call(node, TOKEN_MIXING, x, gamma, beta, eps, *layers, residual)
    node.replace_all_uses_with(made)
    for reader, val in changed.items():
        reader.meta["val"] = val
    settle(owner)
    return True


def _rows(node: fx.Node) -> fx.Node:
    """An image with its channels side by side."""
    if node.meta["val"].is_contiguous():
        return node
    return call(node, aten.clone.default, node, memory_format=torch.contiguous_format)


def _shows(node: object) -> Any:
    """What a value is, through views of one kind and another: equal for two views that show the same."""
    if isinstance(node, fx.Node) and is_view(node):
        return node.target, [_shows(a) if isinstance(a, fx.Node) else a for a in node.args]
    return node

"""Gradients of a norm in a backward graph: of its rows, its weight and its bias by one operator, in one pass.

What ``open_norms`` wrote out is for regions that take the rows' gradient in. Left to Inductor it is a kernel for that
and one for the sums over rows, each of which reads gradient and input. So where no region has taken any of it, it is
one operator; norms too wide to be opened are, too. A residual's gradient that is added to the rows' goes along.
Microseconds on an H200, bf16, with such rows, without the last sum of partial ones:

    rows x columns   Inductor   ours   bytes at 4.3 TB/s
    50,176 x 96          33.1   15.5   9.0
    12,608 x 192         15.4    5.9   4.5
    12,608 x 384         34.4    8.6   9.0
     1,024 x 768         12.4    3.8   1.5
    16,384 x 1,024       58.4   35.6  31.2
"""

from __future__ import annotations

import hashlib
import operator as python
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import arguments, aten, packet, sums_rows, tensor_of, value
from tilestream.graph.own import operator
from tilestream.graph.rewrites.insert import call, cast
from tilestream.graph.rewrites.norms import Writer, eps_of, gradients
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.norm_gradients import NormGradients


def norm_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float, centred: bool, beside: Tensor | None, parts: int
) -> tuple[Tensor, Tensor]:
    """The gradient of LayerNorm's input, or of RMSNorm's if not ``centred``, [*, columns]; and what those of its weight
    and bias are sums of, fp32 (fp64 of fp64) [parts, sums, columns], of RMSNorm one of its weight. All is fp32 and
    rounded once.

    Args:
        gradient, x: [*, columns], of the norm's result and its input. weight: [columns], or None.
        beside: [*, columns], added to the first result.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    columns = x.shape[-1]
    g, rows = (t.to(wide).reshape(-1, columns) for t in (gradient, x))
    middle = rows - rows.mean(-1, keepdim=True) if centred else rows
    scale = (middle.square().mean(-1, keepdim=True) + eps).rsqrt()
    normal = middle * scale
    scaled = g if weight is None else g * weight.to(wide)
    along = normal * (scaled * normal).mean(-1, keepdim=True)
    made = ((scaled - scaled.mean(-1, keepdim=True) if centred else scaled) - along) * scale
    made = made.reshape(x.shape)
    totals = torch.stack([(g * normal).sum(0), g.sum(0)][: 1 + centred])
    sums = torch.cat([totals[None], totals.new_zeros(parts - 1, *totals.shape)])
    return (made if beside is None else made + beside).to(x.dtype), sums


NORM_GRADIENTS = operator(
    norm_gradients,
    lambda _, x, __, ___, centred, ____, parts: (
        x.new_empty(x.shape),
        x.new_empty(parts, 1 + centred, x.shape[-1], dtype=torch.float32),
    ),
    "norm_gradients:made",
)


@dataclass(frozen=True)
class _Norm:
    """What gradients of a norm are made of, as ``norm_gradients``; and the nodes that they are, each as often as it is
    there: of the rows, of the weight, of the bias."""

    gradient: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float
    centred: bool
    found: tuple[Sequence[fx.Node], Sequence[fx.Node], Sequence[fx.Node]]

    @property
    def shape(self) -> NormGradients | None:
        """What its kernel is compiled for, but for rows beside; None: there is none, or the rows alone are wanted."""
        rows, weights, _ = self.found
        given = [self.gradient, self.x, *rows, *([self.weight] if self.weight else [])]
        fakes = [fake for n in given if (fake := value(n)) is not None and fake.is_contiguous()]
        alike = len(fakes) == len(given) and len({fake.dtype for fake in fakes}) == 1
        if not rows or not weights or not alike or DTYPES.get(fakes[0].dtype) not in ("bf16", "f16"):
            return None
        columns = fakes[0].shape[-1]
        shape = NormGradients(columns, DTYPES[fakes[0].dtype], self.centred, self.weight is not None, False)
        return shape if isinstance(columns, int) and shape.taken else None


def join_norm_gradients(graph: fx.Graph, _: Settings) -> int:
    """All gradients of a norm by one operator, where nothing of them is in a region."""
    return _joined(_opened(graph))


def join_wide_norms(graph: fx.Graph, _: Settings) -> int:
    """Likewise those of norms of a joint graph that no region holds, of which ``open_norms`` would write nothing."""
    return _joined([norm for norm in _whole(graph) if tensor_of(norm.x).shape[-1] > MAX_FEATURES])


def _joined(norms: Sequence[_Norm]) -> int:
    return sum(_replace(norm, shape) for norm in norms if (shape := norm.shape) is not None)


def _whole(graph: fx.Graph) -> list[_Norm]:
    """Norms whose gradients torch's operator still is."""
    made: list[_Norm] = []
    for node in graph.nodes:
        if packet(node) in _OPERATORS and (eps := eps_of(node)) is not None:
            gradient, x, weight = (arguments(node)[k] for k in (0, 1, _OPERATORS[packet(node)]))
            parts = [[u for u in node.users if u.args[1] == k] for k in range(3)]
            centred = packet(node) is aten.native_layer_norm_backward
            made.append(_Norm(gradient, x, weight, eps, centred, (parts[0], parts[1], parts[2])))
    return made


_OPERATORS = {aten.native_layer_norm_backward: 5, aten._fused_rms_norm_backward: 4}
"""And which argument is the weight."""


def _opened(graph: fx.Graph) -> list[_Norm]:
    """Norms whose gradients ``open_norms`` wrote out: what it would write again is there."""
    numbers = _Numbers(graph)
    made: list[_Norm] = []
    for total in [n for n in graph.nodes if sums_rows(n)]:
        if numbers.alike(total)[0] is not total or (read := _read(total)) is None:
            continue
        # The first like it, lest it come behind one of those that are replaced.
        gradient, x, (eps, centred) = numbers.alike(read[0])[0], numbers.alike(read[1])[0], read[2:]
        for weight in _weights(numbers.alike(gradient)):
            before = {*graph.nodes}
            with graph.inserting_before(total):
                w = Writer(total, eps)
                rows, scale = gradients(w, gradient, x, weight, (True, True), centred)
                bias = w.cast(w.total(gradient), value(scale).dtype) if centred else None  # pyright: ignore
            found = [numbers.alike(n) for n in (rows, scale, bias)]
            for node in reversed([n for n in graph.nodes if n not in before]):
                graph.erase_node(node)
            made.append(_Norm(gradient, x, weight, eps, centred, (found[0], found[1], found[2])))
    return made


def _read(total: fx.Node) -> tuple[fx.Node, fx.Node, float, bool] | None:
    """Gradient, input, eps and whether means are subtracted, if ``total`` is the sum of ``x^`` times the gradient."""
    normal, gradient = _operands(total.args[0], aten.mul)
    rows, scale = _operands(normal, aten.mul)
    shifted, _ = _operands(scale, aten.rsqrt)
    _, eps = _operands(shifted, aten.add)
    if not isinstance(gradient, fx.Node) or not isinstance(rows, fx.Node) or not isinstance(eps, int | float):
        return None
    centred = packet(rows) is aten.sub
    x = rows.args[0] if centred or packet(rows) is aten._to_copy else rows
    return (gradient, x, float(eps), centred) if isinstance(x, fx.Node) else None


def _operands(node: object, wanted: object) -> tuple[Any, Any]:
    """The first two of an operator that is ``wanted``; nothing of another."""
    is_it = isinstance(node, fx.Node) and packet(node) is wanted
    return (*node.args, None)[:2] if is_it else (None, None)  # pyright: ignore


def _weights(gradients: Sequence[fx.Node]) -> list[fx.Node | None]:
    """What a gradient, each of these, is multiplied with; and nothing."""
    casts = [u for n in gradients for u in n.users if packet(u) is aten._to_copy]
    scaled = [u for n in (*gradients, *casts) for u in n.users if packet(u) is aten.mul and u.args[0] is n]
    vectors = [n for u in scaled if (fake := value(n := u.args[1])) is not None and fake.dim() == 1]
    return [*dict.fromkeys(vectors), None]  # pyright: ignore[reportReturnType]


class _Numbers:
    """Which nodes of a graph compute the same of the same: every use of a view has one of its own, and sums have copies
    of what they read."""

    def __init__(self, graph: fx.Graph) -> None:
        self._names: dict[fx.Node, str] = {}
        self._alike: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            self._alike.setdefault(self._name(node), []).append(node)

    def alike(self, node: fx.Node | None) -> list[fx.Node]:
        """Those that a new node is like."""
        return [] if node is None else self._alike.get(self._name(node), [])

    def _name(self, node: fx.Node) -> str:
        """Of what a node computes, of such names."""
        if node not in self._names:
            given = map_arg((node.args, node.kwargs), self._name)
            made = node.op == "call_function"
            text = f"{node.target} {given}" if made else node.name
            self._names[node] = hashlib.sha256(text.encode()).hexdigest()
        return self._names[node]


def _replace(norm: _Norm, shape: NormGradients) -> bool:
    """Put the operator in the place of what was found, if its operands are there by then; whether it did."""
    rows, weights, biases = norm.found
    read = [n for n in (norm.gradient, norm.x, norm.weight) if n is not None]
    biases = [n for n in biases if all(r < n for r in read)]  # else made before ``x`` is, and left as it is
    first, fake = min(*rows, *weights, *biases), norm.x.meta["val"]
    if not all(r < first for r in read):
        return False
    last, beside = _with_beside(rows, first)
    parts = shape.ctas(hint(fake.numel()) // shape.columns)
    with first.graph.inserting_before(first):
        made = call(first, NORM_GRADIENTS, norm.gradient, norm.x, norm.weight, norm.eps, norm.centred, beside, parts)
        along, sums = (call(first, python.getitem, made, k) for k in range(2))
        totals = call(first, aten.sum.dim_IntList, sums, [0])
        for node in last:
            node.replace_all_uses_with(along)
        for k, some in enumerate((weights, biases)):
            for node in some:
                node.replace_all_uses_with(cast(node, call(first, aten.select.int, totals, 0, k)))
    return True


def _with_beside(rows: Sequence[fx.Node], first: fx.Node) -> tuple[Sequence[fx.Node], fx.Node | None]:
    """What the rows' gradient is with what is added to it, which is there before ``first``; and that."""
    users = [user for node in rows for user in node.users]
    if len(users) == 1 and packet(users[0]) is aten.add and not users[0].kwargs:
        others = [n for n in users[0].args if n not in rows]
        fake, own = (value(others[0]) if len(others) == 1 else None), value(rows[0])
        if fake is not None and own is not None and isinstance(others[0], fx.Node) and others[0] < first:
            if fake.shape == own.shape and fake.dtype == own.dtype and fake.is_contiguous():
                return users, others[0]
    return rows, None

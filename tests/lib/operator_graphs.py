"""ATen graphs by hand as graphs of operators: layers, their backward, branches; for tests of selection and design."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilestream.studies.kitsune.capture import assemble
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.record import Recorded

aten = torch.ops.aten
ACTIVATIONS = {
    "relu": (aten.relu.default,),
    "silu": (aten.silu.default,),
    "rsqrt": (aten.rsqrt.default,),
    "pow": (aten.pow.Tensor_Scalar, 2),
}
BINARY = {"add": aten.add.Tensor, "mul": aten.mul.Tensor}


class Builder:
    """Writes nodes; every method returns the one that it makes, by the name that it is given. bf16, nothing is run."""

    def __init__(self, name: str = "made") -> None:
        self.name = name
        self.forward, self.late = fx.Graph(), fx.Graph()
        self.graph_at_work = self.forward
        self.stored: set[str] = set()
        self.layers: dict[str, fx.Node] = {}

    def given(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, stored: bool = False) -> fx.Node:
        node = self.graph_at_work.create_node("placeholder", name, name=name)
        node.meta["val"] = torch.empty(shape, device="meta", dtype=dtype)
        if stored:
            self.stored.add(name)
        return node

    def input(self, name: str, *shape: int) -> fx.Node:
        return self.given(name, *shape)

    def call(self, name: str, target, *args) -> fx.Node:
        """A node; operands of the forward graph come into the backward one under their names."""
        args = fx.node.map_arg(args, self._here)
        node = self.graph_at_work.create_node("call_function", target, args, name=name)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def _here(self, node: fx.Node) -> fx.Node:
        if node.graph is self.graph_at_work:
            return node
        known = {n.name: n for n in self.late.nodes}
        if node.name not in known:
            known[node.name] = self.late.create_node("placeholder", node.name, name=node.name)
            known[node.name].meta["val"] = node.meta["val"]
        return known[node.name]

    def linear(self, name: str, x: fx.Node, n: int, bias: bool = True) -> fx.Node:
        weight = self.layers[name] = self.given(f"{name}_weight", n, x.meta["val"].shape[-1], stored=True)
        turned = self.call(f"{name}_t", aten.t.default, weight)
        if not bias:
            return self.call(name, aten.mm.default, x, turned)
        return self.call(name, aten.addmm.default, self.given(f"{name}_bias", n, stored=True), x, turned)

    def act(self, name: str, x: fx.Node, label: str = "relu") -> fx.Node:
        target, *more = ACTIVATIONS[label]
        return self.call(name, target, x, *more)

    def binary(self, name: str, a: fx.Node, b: fx.Node, label: str = "add") -> fx.Node:
        return self.call(name, BINARY[label], a, b)

    def cat(self, name: str, *parts: fx.Node) -> fx.Node:
        return self.call(name, aten.cat.default, list(parts), -1)

    def norm(self, name: str, x: fx.Node) -> fx.Node:
        width = x.meta["val"].shape[-1]
        vectors = [self.given(f"{name}_{part}", width, stored=True) for part in ("weight", "bias")]
        made = self.call(name, aten.native_layer_norm.default, x, [width], *vectors, 1e-5)
        return self.call(f"{name}_value", operator.getitem, made, 0)

    def gather(self, name: str, x: fx.Node, rows: int) -> fx.Node:
        return self.call(name, aten.index_select.default, x, 0, self.given(f"{name}_i", rows, dtype=torch.int64))

    def scan(self, name: str, x: fx.Node) -> fx.Node:
        """Running sums over the rows, which nothing fuses."""
        return self.call(name, aten.cumsum.default, x, 0)

    def backward(
        self, name: str, grad: fx.Node, layer: str, x: fx.Node, act: fx.Node | None = None, order: str = "xwb"
    ) -> fx.Node:
        """An activation's derivative where ``act`` is its result, then dX, dW and db of a linear, in this ``order``."""
        self.graph_at_work = self.late
        if act is not None:
            grad = self.call(f"{name}_da", aten.threshold_backward.default, grad, act, 0)
        out = grad
        for part in order:
            if part == "x":
                out = self.call(f"{name}_dx", aten.mm.default, grad, self.layers[layer])
            elif part == "w":
                self.call(f"{name}_dw", aten.mm.default, self.call(f"{name}_gt", aten.t.default, grad), x)
            else:
                self.call(f"{name}_db", aten.sum.dim_IntList, grad, [0])
        return out

    def gradient(self, name: str, *shape: int) -> fx.Node:
        """What comes into the backward graph, which begins here."""
        self.graph_at_work = self.late
        return self.given(name, *shape)

    def graph(self, *outputs: fx.Node) -> OperatorGraph:
        """All values that nobody reads are results, and ``outputs``; what the backward graph reads is saved."""
        late = {n.name for n in self.late.nodes if n.op == "placeholder"}
        made = [n for n in self.forward.nodes if n.op == "call_function" and not isinstance(n.meta["val"], tuple)]
        results = [n for n in made if n in outputs or not (n.users or n.name in late)]
        self.forward.output((*results, *(n for n in self.forward.nodes if n.name in late)))
        if not late:
            return assemble(self.name, "inference", Recorded(self.forward, stored=self.stored))
        self.late.output(tuple(n for n in self.late.nodes if n.op == "call_function" and not n.users))
        return assemble(self.name, "training", Recorded(self.forward, self.late, self.stored))


def mlp(rows: int = 4096, sizes: tuple[int, ...] = (64, 256, 256, 32), norm: bool = False) -> OperatorGraph:
    """Linears with ReLU between them."""
    b = Builder("mlp")
    h = b.input("x", rows, sizes[0])
    for i, n in enumerate(sizes[1:]):
        h = b.linear(f"l{i}", h, n)
        if i < len(sizes) - 2:
            h = b.act(f"a{i}", h)
    if norm:
        b.norm("ln", h)
    return b.graph()


def nerf(rows: int = 9728) -> OperatorGraph:
    """NeRF as nerf-pytorch has it: 12 linears, 9 ReLUs, 3 concatenations."""
    b = Builder("nerf")
    points, views = b.input("points", rows, 63), b.input("views", rows, 27)
    h = points
    for i in range(8):
        h = b.act(f"relu{i}", b.linear(f"l{i}", h, 256))
        if i == 4:
            h = b.cat("skip", points, h)
    alpha = b.linear("alpha", h, 1)
    h = b.cat("join", b.linear("feature", h, 256), views)
    h = b.act("relu_v", b.linear("view", h, 128))
    b.cat("out", b.linear("rgb", h, 3), alpha)
    return b.graph()


def trained_mlp(rows: int = 4096, sizes: tuple[int, ...] = (64, 256, 256, 32), order: str = "xwb") -> OperatorGraph:
    """Forward and backward of linears, each with a ReLU behind it."""
    b = Builder("trained")
    h = b.input("x", rows, sizes[0])
    layers = []
    for i, n in enumerate(sizes[1:]):
        y = b.act(f"a{i}", b.linear(f"l{i}", h, n))
        layers.append((i, h, y))
        h = y
    g = b.gradient("tangents_1", rows, sizes[-1])
    for i, x, y in reversed(layers):
        g = b.backward(f"b{i}", g, f"l{i}", x, y, order if i > 0 else order.replace("x", ""))
    return b.graph(h)


def gated_ffn(rows: int = 1024, width: int = 512, hidden: int = 1536) -> OperatorGraph:
    """RMSNorm, gate, up, down and the residual, as in Llama."""
    b = Builder("ffn")
    x = b.input("x", rows, width)
    mean = b.call("mean", aten.mean.dim, b.act("square", x, "pow"), [-1], True)
    scaled = b.binary("scale", x, b.act("root", mean, "rsqrt"), "mul")
    n = b.binary("weigh", scaled, b.given("norm_weight", width, stored=True), "mul")
    gate = b.act("silu", b.linear("gate", n, hidden, bias=False), "silu")
    h = b.binary("product", gate, b.linear("up", n, hidden, bias=False), "mul")
    b.binary("residual", x, b.linear("down", h, width, bias=False))
    return b.graph()

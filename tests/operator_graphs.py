"""Graphs of operators by hand: layers, their backward, branches; for tests of selection and design."""

from __future__ import annotations

from math import prod

from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.operators import Kind, Operand, Operator, OperatorGraph, Phase, Value

PRODUCTS = (Kind.LINEAR, Kind.BMM, Kind.ATTENTION)


class Builder:
    """Collects operators; every method returns the name of the value that it makes. 16-bit values."""

    def __init__(self, name: str = "made") -> None:
        self.name = name
        self.operators: list[Operator] = []
        self.values: dict[str, Value] = {}
        self.phase: Phase = "forward"

    def value(self, name: str, *shape: int, **flags: bool) -> str:
        self.values[name] = Value(name, shape, "bf16", 2 * prod(shape), **flags)
        return name

    def input(self, name: str, *shape: int) -> str:
        return self.value(name, *shape, is_input=True)

    def op(self, name: str, kind: Kind, ins: list[str], shape: tuple[int, ...], label: str = "", **more) -> str:
        operands = tuple(
            Operand(v, self.values[v].shape, float(self.values[v].bytes), float(self.values[v].bytes)) for v in ins
        )
        out = self.value(f"{name}.out", *shape)
        size = prod(shape)
        more.setdefault("simt_ops", 0.0 if kind in PRODUCTS else float(size))
        self.operators.append(
            Operator(
                name,
                more.pop("target", f"aten.{name}"),
                label or name,
                kind,
                Engine.TENSOR if kind in PRODUCTS else Engine.SIMT,
                self.phase,
                operands,
                (out,),
                (float(2 * size),),
                rows=prod(shape[:-1]),
                tiles=max(1, size // 16384),
                **more,
            )
        )
        return out

    def linear(self, name: str, x: str, n: int, bias: bool = True) -> str:
        m, k = self.values[x].shape
        ins = [x, self.value(f"{name}.weight", n, k, is_parameter=True)]
        if bias:
            ins.append(self.value(f"{name}.bias", n, is_parameter=True))
        return self.op(name, Kind.LINEAR, ins, (m, n), "linear", flops=2.0 * m * n * k, gemm=(1, m, n, k), reduced=k)

    def act(self, name: str, x: str, label: str = "relu") -> str:
        return self.op(name, Kind.ELEMENTWISE, [x], self.values[x].shape, label)

    def binary(self, name: str, a: str, b: str, label: str = "add") -> str:
        return self.op(name, Kind.ELEMENTWISE, [a, b], self.values[a].shape, label)

    def cat(self, name: str, *parts: str) -> str:
        rows = self.values[parts[0]].shape[0]
        return self.op(name, Kind.CAT, list(parts), (rows, sum(self.values[p].shape[-1] for p in parts)), "cat")

    def norm(self, name: str, x: str) -> str:
        return self.op(name, Kind.NORM, [x], self.values[x].shape, "layer_norm", reduced=self.values[x].shape[-1])

    def gather(self, name: str, x: str, rows: int) -> str:
        return self.op(name, Kind.GATHER, [x], (rows, self.values[x].shape[-1]), "index")

    def backward(self, name: str, grad: str, layer: str, x: str, act: str = "", dx: bool = True) -> str:
        """An activation's derivative where ``act`` names its result, then dX, dW and dB of a linear."""
        self.phase = "backward"
        if act:
            grad = self.op(f"{name}.da", Kind.ELEMENTWISE, [grad, act], self.values[grad].shape, "relu backward")
        (m, n), k = self.values[grad].shape, self.values[x].shape[-1]
        weight = f"{layer}.weight"
        out = grad
        if dx:
            out = self.op(
                f"{name}.dx", Kind.LINEAR, [grad, weight], (m, k), "linear dX", flops=2.0 * m * n * k, gemm=(1, m, k, n)
            )
        for part, kind, ins, shape, more in (
            ("dw", Kind.LINEAR, [grad, x], (n, k), {"flops": 2.0 * m * n * k, "gemm": (1, n, k, m)}),
            ("db", Kind.REDUCTION, [grad], (n,), {"simt_ops": float(m * n)}),
        ):
            self.op(f"{name}.{part}", kind, ins, shape, f"linear {part}", over_rows=True, reduced=m, **more)
        return out

    def graph(self, *outputs: str) -> OperatorGraph:
        read = {x.value for op in self.operators for x in op.inputs}
        late = {x.value for op in self.operators if op.phase == "backward" for x in op.inputs}
        early = {v for op in self.operators if op.phase == "forward" for v in op.outputs}
        values = {}
        for name, v in self.values.items():
            leaf = name.endswith(".out") and name not in read
            values[name] = Value(
                v.name,
                v.shape,
                v.dtype,
                v.bytes,
                v.is_parameter,
                v.is_input,
                leaf or name in outputs,
                name in late and name in early,
            )
        training = any(op.phase == "backward" for op in self.operators)
        return OperatorGraph(self.name, "training" if training else "inference", tuple(self.operators), values)


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


def trained_mlp(rows: int = 4096, sizes: tuple[int, ...] = (64, 256, 256, 32)) -> OperatorGraph:
    """Forward and backward of linears, each with a ReLU behind it."""
    b = Builder("trained")
    h = b.input("x", rows, sizes[0])
    layers = []
    for i, n in enumerate(sizes[1:]):
        y = b.act(f"a{i}", b.linear(f"l{i}", h, n))
        layers.append((i, h, y))
        h = y
    g = b.input("grad", rows, sizes[-1])
    for i, x, y in reversed(layers):
        g = b.backward(f"b{i}", g, f"l{i}", x, y, dx=i > 0)
    return b.graph(h)


def gated_ffn(rows: int = 1024, width: int = 512, hidden: int = 1536) -> OperatorGraph:
    """RMSNorm, gate, up, down and the residual, as in Llama."""
    b = Builder("ffn")
    x = b.input("x", rows, width)
    mean = b.op("mean", Kind.REDUCTION, [b.act("square", x, "pow")], (rows, 1), "mean", reduced=width)
    scaled = b.binary("scale", x, b.act("root", mean, "rsqrt"), "mul")
    weight = b.value("norm.weight", width, is_parameter=True)
    n = b.op("weigh", Kind.ELEMENTWISE, [scaled, weight], (rows, width), "mul")
    gate = b.act("silu", b.linear("gate", n, hidden, bias=False), "silu")
    h = b.binary("product", gate, b.linear("up", n, hidden, bias=False), "mul")
    b.binary("residual", x, b.linear("down", h, width, bias=False))
    return b.graph()

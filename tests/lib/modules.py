"""Small modules that stream wholly, by the operator that each is about: (module, shapes of its inputs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[tuple[int, ...], ...]]


class Fn(nn.Module):
    """A function of linear layers ``a`` (and ``b``) and of the inputs."""

    def __init__(self, function: Callable[..., object], *layers: nn.Module, **tensors: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)
        for name, shape in tensors.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))

    def forward(self, *inputs: Tensor) -> object:
        return self.function(self, *inputs)


def linear(ins: int, outs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(ins, outs, bias)


def two_regions() -> nn.Module:
    """Two linear layers with a sum over rows between them, which no region has."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.layers[1](m.layers[0](x).relu().cumsum(0) / 37).relu()

    return Fn(forward, linear(9, 13), linear(13, 7)).bfloat16()


class Recurrent(nn.Module):
    """An LSTM, which Dynamo does not trace, and a layer on its last result: ``[batch, steps, 9]`` to ``[batch, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(9, 13, batch_first=True), linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _unary(function: Callable[[Tensor], Tensor], outs: int = 13) -> Case:
    return Fn(lambda m, x: function(m.layers[0](x)), linear(9, outs)), ((37, 9),)


def _binary(function: Callable[[nn.Module, Tensor, Tensor], object], other: tuple[int, ...] = (37, 13), **t) -> Case:
    return Fn(lambda m, x, y: function(m, m.layers[0](x), y), linear(9, 13), **t), ((37, 9), other)


UNARY: dict[str, Case] = {
    "relu": _unary(torch.relu),
    "gelu": _unary(F.gelu),
    "gelu_tanh": _unary(lambda x: F.gelu(x, approximate="tanh")),
    "silu": _unary(F.silu),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "softplus": _unary(lambda x: F.softplus(x, beta=2.0, threshold=3.0)),
    "exp_log": _unary(lambda x: torch.log(torch.exp(x) + 1.5)),
    "sin_cos": _unary(lambda x: torch.sin(x) + torch.cos(x * 3)),
    "neg_abs_sqrt": _unary(lambda x: torch.sqrt(torch.abs(-x) + 0.1)),
    "rsqrt_reciprocal": _unary(lambda x: torch.rsqrt(x.abs() + 1) + torch.reciprocal(x.abs() + 2)),
    "powers": _unary(lambda x: x**2 + x**3 + (x.abs() + 1) ** 0.5 + (x.abs() + 1) ** -1),
    "scalars": _unary(lambda x: (2 - x) / 3 + 1 / (x.abs() + 1) - torch.add(x, 1.5, alpha=2) * 0.25),
    "clamp": _unary(lambda x: x.clamp(-0.5, 0.25) + x.clamp(min=0.1) + x.clamp(max=-0.1)),
    "relu6_hardtanh": _unary(lambda x: F.relu6(8 * x) + F.hardtanh(x)),
    "leaky_relu": _unary(lambda x: F.leaky_relu(x, 0.2) + F.leaky_relu(x, -2.0)),
    "hardswish_hardsigmoid": _unary(lambda x: F.hardswish(4 * x) + F.hardsigmoid(4 * x)),
    "mish_logsigmoid": _unary(lambda x: F.mish(x) + F.logsigmoid(x)),
    "elu_selu": _unary(lambda x: F.elu(x, 0.5) + F.selu(x) + F.celu(x, 2.0)),
    "glu": _unary(F.glu, 26),
    "casts": _unary(lambda x: (x.float() * 1.5).to(x.dtype).contiguous().clone()),
    "dropout": _unary(lambda x: F.dropout(x, 0.5, training=False)),
}

BINARY: dict[str, Case] = {
    "tiles": _binary(lambda m, h, y: h + y * h - y),
    "maximum": _binary(lambda m, h, y: torch.maximum(h, y) / (torch.minimum(h, y).abs() + 1)),
    "alpha": _binary(lambda m, h, y: torch.add(h, y, alpha=0.5) + torch.sub(h, y, alpha=2) + torch.rsub(h, y, alpha=3)),
    "column": _binary(lambda m, h, y: h * y + y, (37, 1)),
    "vector": _binary(lambda m, h, y: h * y + m.v, (13,), v=(13,)),
    "row": _binary(lambda m, h, y: y - h * m.v, (1, 13), v=(1, 13)),
    "scalar_tensor": _binary(lambda m, h, y: h * y + m.s, (), s=(1,)),
    "addcmul": _binary(lambda m, h, y: torch.addcmul(h, h, y, value=0.5)),
    "matrix_bias": _binary(lambda m, h, y: torch.addmm(y, h, m.w), (37, 5), w=(13, 5)),
}

FEATURES: dict[str, Case] = {
    "cat": (
        Fn(lambda m, x, y: m.layers[0](torch.cat([x, y, x.sin()], -1)), linear(23, 7)),
        ((37, 9), (37, 5)),
    ),
    "split": (
        Fn(
            lambda m, x: sum(f(p) for f, p in zip(m.layers, x.split([3, 6], -1), strict=True)),
            linear(3, 7),
            linear(6, 7),
        ),
        ((37, 9),),
    ),
    "chunk_linear": (Fn(lambda m, x: torch.mul(*m.layers[0](x).chunk(2, -1)), linear(9, 14)), ((4, 5, 9),)),
    "gated_wide": (
        Fn(
            lambda m, x: m.layers[1](F.silu((h := m.layers[0](x))[..., :300]) * h[..., 300:]),
            linear(9, 600),
            linear(300, 5),
        ),
        ((4, 5, 9),),
    ),
    "narrow": (Fn(lambda m, x: m.layers[0](x.narrow(-1, 2, 4)).exp() * x[:, 1:2], linear(4, 13)), ((37, 9),)),
    "select": (
        Fn(
            lambda m, x: (lambda h: h[..., :3].sigmoid() * h[..., 3].relu().unsqueeze(-1))(m.layers[0](x)), linear(9, 4)
        ),
        ((3, 7, 9),),
    ),
    "layer_norm": (Fn(lambda m, x: m.layers[1](m.layers[0](x)) + x, linear(9, 9), nn.LayerNorm(9)), ((37, 9),)),
    "layer_norm_plain": (
        Fn(lambda m, x: F.layer_norm(m.layers[0](x), (13,), eps=1e-3), linear(9, 13)),
        ((37, 9),),
    ),
    "rms_norm": (Fn(lambda m, x: m.layers[1](m.layers[0](x)), linear(9, 13), nn.RMSNorm(13)), ((37, 9),)),
    "rms_norm_plain": (Fn(lambda m, x: F.rms_norm(m.layers[0](x), (13,), eps=1e-3), linear(9, 13)), ((2, 18, 9),)),
    "reductions": (
        Fn(
            lambda m, x: (lambda h: (h.sum(-1), h.mean(-1, keepdim=True), h.amax(-1), h.amin(1), h - h.mean(1, True)))(
                m.layers[0](x)
            ),
            linear(9, 13),
        ),
        ((37, 9),),
    ),
    "dropped_dims": (
        Fn(lambda m, x: m.layers[0](x) * m.layers[0](x).mean(-1).exp().add(1).unsqueeze(-1), linear(9, 13)),
        ((3, 7, 9),),
    ),
    "variance": (Fn(lambda m, x: m.layers[0](x).var(-1, keepdim=True) + x, linear(9, 13)), ((37, 9),)),
    "softmax": (Fn(lambda m, x: m.layers[0](x).softmax(-1), linear(9, 13)), ((37, 9),)),
    "log_softmax": (Fn(lambda m, x: m.layers[0](x).log_softmax(-1), linear(9, 13)), ((37, 9),)),
    "softmax_float": (Fn(lambda m, x: m.layers[0](x).softmax(-1, dtype=torch.float32), linear(9, 13)), ((37, 9),)),
}

BINARY["constants"] = _binary(lambda m, h, y: (h + torch.tensor(1.5)) * y * torch.tensor([0.5] * 13, device=h.device))
FEATURES["batch_norm"] = (
    Fn(lambda m, x: m.layers[1](m.layers[0](x)).relu(), linear(9, 13), nn.BatchNorm1d(13).eval()),
    ((37, 9),),
)
FEATURES["einsum"] = (
    Fn(lambda m, x: m.layers[0](torch.einsum("bnd,df->bnf", x, m.w).relu()), linear(13, 5), w=(9, 13)),
    ((3, 7, 9),),
)

SHAPES: dict[str, Case] = {
    "vector_input": (linear(9, 13), ((9,),)),
    "one_row": (linear(9, 13), ((1, 9),)),
    "no_bias": (linear(9, 13, bias=False), ((2, 3, 4, 9),)),
    "one_wide": (Fn(lambda m, x: m.layers[1](m.layers[0](x).relu()) + x, linear(1, 5), linear(5, 1)), ((130, 1),)),
    "stored_in_out": (Fn(lambda m, x: x @ m.w, w=(9, 13)), ((5, 37, 9),)),
    "flatten": (Fn(lambda m, x: m.layers[0](x.flatten(0, 1)).relu().unflatten(0, (4, 5)), linear(9, 13)), ((4, 5, 9),)),
    "transposed_input": (Fn(lambda m, x: m.layers[0](x.t()).relu(), linear(9, 13)), ((9, 37),)),
    "several_outputs": (
        Fn(lambda m, x: [h := m.layers[0](x), m.layers[1](h.relu()), h.sigmoid()], linear(9, 13), linear(13, 2)),
        ((70, 9),),
    ),
    "heads": (
        Fn(lambda m, x: {"a": m.layers[0](x), "b": m.layers[1](x).tanh()}, linear(9, 13), linear(9, 3)),
        ((70, 9),),
    ),
}

ALL: dict[str, Case] = {**UNARY, **BINARY, **FEATURES, **SHAPES}

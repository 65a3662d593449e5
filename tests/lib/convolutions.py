"""Convolution chains as pipelines, their tensors, and what torch makes of them."""

from __future__ import annotations

import functools

import torch
from programs import Program
from torch.nn import functional

from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Tensor, Tile
from tilestream.ir.taps import Window


class Convolutions(Program):
    """A ``Program`` whose rows are pixels."""

    def taps(self, name: str, window: Window, channels: int, bulk: bool = False) -> Tile:
        """The rows of an implicit im2col, ``taps x channels`` wide."""
        if all(t.name != name for t in self.tensors):
            self.tensors.append(Tensor.pictures(name, window.height, window.width, channels, self.dtype))
        loads = [self.op("load", channels, params=(name,), **dict(tap.attrs)) for tap in window.taps(bulk)]
        return self.cat(*loads) if len(loads) > 1 else loads[0]


def chain(
    window: Window,
    channels: int,
    hidden: int,
    out: int,
    residual: bool = False,
    dtype: str = "bf16",
    bulk: bool = False,
    act: str = "relu",
) -> Pipeline:
    """k x k, activation, 1 x 1, with a residual: the tail of a ResNet's bottleneck; ``out`` 0: the k x k alone."""
    p = Convolutions("convolutions", dtype)
    h = p.linear(p.taps("x", window, channels, bulk), hidden, act)
    if out:
        h = p.linear(h, out)
    if residual:
        h = p.op("relu", out, p.op("add", out, h, p.load("r", out)))
    p.store(h)
    return p.build()


TAIL = Window(56, 56, (3, 3), padding=(1, 1))
"""Of ResNet's first bottlenecks."""
TAILS = {
    "convolutions": functools.partial(chain, TAIL, 64, 64, 256, residual=True),
    "convolutions_bulk": functools.partial(chain, TAIL, 64, 64, 256, residual=True, bulk=True),
}


def tensors(p: Pipeline, window: Window, images: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = images * window.out[0] * window.out[1]
    made = {}
    for t in p.tensors:
        if t.role.value == "output":
            continue
        shape = tuple((images if len(t.axes) == 4 else rows) if a.size is None else a.size for a in t.axes)
        scale = t.features**-0.5 if len(t.axes) == 2 and t.role.value == "parameter" else 1.0
        made[t.name] = (scale * torch.randn(shape, generator=g)).to(TORCH_DTYPES[t.dtype])
    return made


def by_torch(p: Pipeline, window: Window, given: dict[str, torch.Tensor], act: str = "relu") -> torch.Tensor:
    """The rows of ``chain`` by ``conv2d`` in float64."""
    wide = {name: t.double() for name, t in given.items()}
    weights = [wide[t.name] for t in p.tensors if t.name[0] == "w"]
    biases = [wide[t.name] for t in p.tensors if t.name[0] == "b"]
    x = wide["x"].permute(0, 3, 1, 2)
    kernel = weights[0].reshape(len(weights[0]), *window.kernel, -1).permute(0, 3, 1, 2)
    h = functional.conv2d(x, kernel, biases[0], window.stride, window.padding, window.dilation)
    h = getattr(functional, act)(h).permute(0, 2, 3, 1).flatten(0, 2)
    if len(weights) > 1:
        h = h @ weights[1].T + biases[1]
    return torch.relu(h + wide["r"]) if "r" in wide else h

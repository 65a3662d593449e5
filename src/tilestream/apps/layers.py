"""Single layers of transformers at their published sizes: products of one input, as programs of rows and in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def random_operands(program: Pipeline, rows: int, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs of ``rows`` rows and weights that keep values of order one, by name."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for t in program.tensors:
        if t.role is not Role.OUTPUT:
            shape = t.shape if t.role is Role.PARAMETER else (rows, *t.shape)
            scale = shape[-1] ** -0.5 if t.role is Role.PARAMETER and len(shape) == 2 else 1.0
            made[t.name] = (scale * torch.randn(shape, generator=generator)).to(TORCH_DTYPES[t.dtype]).to(device)
    return made


@dataclass(frozen=True)
class Layer:
    """``k`` to each of ``outs``, as ``y0``, ``y1``, ...: with biases, an activation, a residual ``r`` behind the first.

    ``stream``: dtype of a residual and of what it is added to, where that is another.
    ``norm``: ``layer`` or ``rms``, in front. ``gated``: times a second product of the same input, after the activation.
    """

    k: int
    outs: tuple[int, ...]
    norm: str = ""
    bias: bool = False
    act: str = ""
    residual: bool = False
    dtype: str = "bf16"
    gated: bool = False
    stream: str = ""

    def program(self) -> Pipeline:
        """One stage of row ops, as a region has them."""
        w, ops = self, []
        tensors = [Tensor.of("x", Role.INPUT, (w.k,), w.dtype)]

        def parameter(name: str, *shape: int) -> str:
            tensors.append(Tensor.of(name, Role.PARAMETER, shape, w.dtype))
            return name

        def op(kind: str, name: str, width: int, ins: tuple[str, ...], params=(), attrs=(), dtype: str = "") -> str:
            ops.append(TileOp(kind, Tile.of(name, width, dtype or w.dtype), ins, params, attrs, f"model.py:{len(ops)}"))
            return name

        a = op("load", "a", w.k, (), ("x",))
        if w.norm:
            params = (parameter("scale", w.k),)
            if w.norm == "layer":
                params += (parameter("shift", w.k),)
                a = op("layer_norm", "even", w.k, (a,), params, (("eps", 1e-5), ("affine", "wb")))
            else:
                a = op("rms_norm", "even", w.k, (a,), params, (("eps", 1e-6),))
        for f, out in enumerate(w.outs):
            params = (parameter(f"w{f}", out, w.k),)
            y = op("linear", f"u{f}", out, (a,), params + ((parameter(f"b{f}", out),) if w.bias else ()))
            if w.act:
                y = op(w.act, f"h{f}", out, (y,))
            if w.gated:
                y = op("mul", f"m{f}", out, (y, op("linear", f"v{f}", out, (a,), (parameter(f"up{f}", out, w.k),))))
            if w.residual and f == 0:
                kept = w.stream or w.dtype
                tensors.append(Tensor.of("r", Role.INPUT, (out,), kept))
                y = op("add", "new", out, (op("load", "old", out, (), ("r",), dtype=kept), y), dtype=kept)
            tensors.append(Tensor.of(f"y{f}", Role.OUTPUT, (out,), w.stream or w.dtype))
            ops.append(TileOp("store", None, (y,), (f"y{f}",)))
        return Pipeline("layer", tuple(tensors), (Stage.of("all", tuple(ops)),))

    def tensors(self, rows: int, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs and weights that keep values of order one."""
        return random_operands(self.program(), rows, device, seed)

    def eager(self, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The layer in torch, at the precision of ``t``: every result by name."""
        a = t["x"]
        if self.norm == "layer":
            a = F.layer_norm(a, (self.k,), t["scale"], t["shift"], 1e-5)
        elif self.norm:
            a = F.rms_norm(a, (self.k,), t["scale"], 1e-6)
        made = {}
        for f in range(len(self.outs)):
            y = F.linear(a, t[f"w{f}"], t.get(f"b{f}"))
            y = ACTIVATIONS[self.act](y) if self.act else y
            y = y * F.linear(a, t[f"up{f}"]) if self.gated else y
            made[f"y{f}"] = t["r"] + y if self.residual and f == 0 else y
        return made


LAYERS = {
    "llama-qkv": Layer(2048, (2048, 512, 512), "rms"),
    "qwen-qkv": Layer(1024, (2048, 1024, 1024), "rms"),
    "bert-qkv": Layer(768, (768, 768, 768), bias=True),
    "vit-qkv": Layer(768, (768, 768, 768), "layer", bias=True),
    "gpt2-qkv": Layer(768, (2304,), "layer", bias=True),
    "llama-o": Layer(2048, (2048,)),
    "qwen-o": Layer(2048, (1024,)),
    "bert-o": Layer(768, (768,), bias=True, residual=True),
    "gpt2-o": Layer(768, (768,), bias=True),
    "bert-up": Layer(768, (3072,), bias=True, act="gelu"),
    "bert-down": Layer(3072, (768,), bias=True, residual=True),
    "vit-joint-qkv": Layer(768, (2304,), bias=True),
    "smollm-qkv": Layer(576, (576, 192, 192)),
    "smollm-o": Layer(576, (576,), residual=True),
    "smollm-gate-up": Layer(576, (1536,), act="silu", gated=True),
    "smollm-down": Layer(1536, (576,), residual=True),
    "deit-joint-qkv": Layer(384, (1152,), bias=True),
    "deit-up": Layer(384, (1536,), bias=True, act="gelu"),
}
"""Projections of Llama-3.2-1B, Qwen3-0.6B, BERT-base, ViT-B, GPT-2, SmolLM-135M and DeiT-S, and layers of their
feed-forward blocks."""

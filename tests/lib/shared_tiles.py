"""Feed-forward blocks as programs of rows, and their values in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tilestream.apps.layers import random_operands
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": F.sigmoid}


@dataclass(frozen=True)
class Ffn:
    """``k`` to ``hid`` to ``out``: gated or not, with biases, with a residual ``r``.

    ``norm``: the input, ``x + r`` where ``sum_first``, is normalised first, and is the residual then.
    """

    hid: int
    k: int
    out: int
    gated: bool = False
    act: str = "relu"
    bias: bool = False
    residual: bool = False
    dtype: str = "bf16"
    norm: str = ""
    sum_first: bool = False

    def program(self) -> Pipeline:
        """One stage of row ops, as a region has them."""
        w, ops = self, []
        tensors = [Tensor.of("x", Role.INPUT, (w.k,), w.dtype), Tensor.of("up", Role.PARAMETER, (w.hid, w.k), w.dtype)]
        tensors += [Tensor.of("down", Role.PARAMETER, (w.out, w.hid), w.dtype)]
        tensors += [Tensor.of("y", Role.OUTPUT, (w.out,), w.dtype)]
        if w.bias:
            tensors += [Tensor.of("b1", Role.PARAMETER, (w.hid,), w.dtype)]
            tensors += [Tensor.of("b2", Role.PARAMETER, (w.out,), w.dtype)]

        def op(kind: str, name: str, width: int, ins: tuple[str, ...], params: tuple[str, ...] = ()) -> str:
            ops.append(TileOp(kind, Tile.of(name, width, w.dtype), ins, params, source=f"model.py:{len(ops)}"))
            return name

        x = op("load", "a", w.k, (), ("x",))
        if w.sum_first:
            tensors.append(Tensor.of("r", Role.INPUT, (w.k,), w.dtype))
            x = op("add", "both", w.k, (x, op("load", "old", w.k, (), ("r",))))
        a = x
        if w.norm:
            tensors.append(Tensor.of("scale", Role.PARAMETER, (w.k,), w.dtype))
            if w.norm == "layer":
                tensors.append(Tensor.of("shift", Role.PARAMETER, (w.k,), w.dtype))
                out = Tile.of("even", w.k, w.dtype)
                affine = (("eps", 1e-5), ("affine", "wb"))
                ops.append(TileOp("layer_norm", out, (x,), ("scale", "shift"), affine, source="model.py:norm"))
            else:
                out = Tile.of("even", w.k, w.dtype)
                ops.append(TileOp("rms_norm", out, (x,), ("scale",), (("eps", 1e-6),), source="model.py:norm"))
            a = "even"
        h = op("linear", "u", w.hid, (a,), ("up", "b1") if w.bias else ("up",))
        if w.gated:
            tensors.append(Tensor.of("gate", Role.PARAMETER, (w.hid, w.k), w.dtype))
            op("linear", "g", w.hid, (a,), ("gate",))
            op(w.act, "s", w.hid, ("g",))
            h = op("mul", "h", w.hid, ("s", "u"))
        else:
            h = op(w.act, "h", w.hid, (h,))
        y = op("linear", "z", w.out, (h,), ("down", "b2") if w.bias else ("down",))
        if w.residual and w.norm:
            y = op("add", "new", w.out, (x, y))
        elif w.residual:
            tensors.append(Tensor.of("r", Role.INPUT, (w.out,), w.dtype))
            op("load", "old", w.out, (), ("r",))
            y = op("add", "new", w.out, ("old", y))
        ops.append(TileOp("store", None, (y,), ("y",)))
        return Pipeline("ffn", tuple(tensors), (Stage.of("all", tuple(ops)),))

    def tensors(self, rows: int, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs and weights that keep values of order one."""
        return random_operands(self.program(), rows, device, seed)

    def eager(self, t: dict[str, torch.Tensor]) -> torch.Tensor:
        """The block in torch, at the precision of ``t``."""
        x = t["x"] + t["r"] if self.sum_first else t["x"]
        a = x
        if self.norm == "layer":
            a = F.layer_norm(x, (self.k,), t["scale"], t["shift"], 1e-5)
        elif self.norm:
            a = F.rms_norm(x, (self.k,), t["scale"], 1e-6)
        u = F.linear(a, t["up"], t.get("b1"))
        act = ACTIVATIONS[self.act]
        h = act(F.linear(a, t["gate"])) * u if self.gated else act(u)
        y = F.linear(h, t["down"], t.get("b2"))
        return (x if self.norm else t["r"]) + y if self.residual else y

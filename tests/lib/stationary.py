"""Pipelines of stationary sums for tests: one product a stage, written as text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Role, Stage
from tilestream.ir.read import axes, program, tensors

WARPGROUP = Level.WARPGROUP


@dataclass(frozen=True)
class Layer:
    """dW[out, k] of dY[rows, out] and X[rows, k], divided over CTAs and over the two warpgroups along ``groups``."""

    out: int
    k: int
    parts: tuple[int, int] = (1, 1)
    splits: int = 1
    groups: str = ""  # "o" (out), "k" or none
    bias: bool = True
    dtype: str = "bf16"
    weight: str = "bf16"  # dtypes of the gradients
    bias_dtype: str = "f32"


def gradients(*layers: Layer) -> Pipeline:
    """A stage a layer: tensors DY0, X0, DW0, DB0, DY1, ..."""
    stages, kinds = [], []
    for n, layer in enumerate(layers):
        names = axes(f"rows o{n}={layer.out} k{n}={layer.k}")
        text = f"""
            g{n}[rows,o{n}]:{layer.dtype} = load DY{n}[rows,o{n}]
            x{n}[rows,k{n}]:{layer.dtype} = load X{n}[rows,k{n}]
            dw{n}[o{n},k{n}]:f32 = product g{n} x{n}
            dw{n} -> DW{n}[o{n},k{n}]
        """
        text += f"\n db{n}[o{n}]:f32 = sum g{n}\n db{n} -> DB{n}[o{n}]" if layer.bias else ""
        shape = f"DY{n}[rows,o{n}]:{layer.dtype} X{n}[rows,k{n}]:{layer.dtype} >DW{n}[o{n},k{n}]:{layer.weight}"
        kinds += tensors(shape + (f" >DB{n}[o{n}]:{layer.bias_dtype}" if layer.bias else ""), names)
        mesh = [
            *(Spread(Level.GRID, p, (a,)) for p, a in zip(layer.parts, (f"o{n}", f"k{n}"), strict=True) if p > 1),
            *([Spread(Level.GRID, layer.splits, ("rows",))] if layer.splits > 1 else []),
            *([Spread(WARPGROUP, 2, (f"{layer.groups}{n}",))] if layer.groups else []),
        ]
        stages.append(Stage(f"layer{n}", program(text, names), (Loop("rows", 64),), tuple(mesh)))
    return Pipeline("gradients", tuple(kinds), tuple(stages))


def data(p: Pipeline, rows: int, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random inputs [rows, features]."""
    torch.manual_seed(seed)
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16}
    return {t.name: torch.randn(rows, t.features, device=device).to(dtypes[t.dtype]) for t in p.by_role(Role.INPUT)}


def exact(p: Pipeline, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every gradient in float64."""
    wide = {name: t.double() for name, t in inputs.items()}
    made = {}
    for t in p.by_role(Role.OUTPUT):
        gradient = wide[t.name.replace("DW", "DY").replace("DB", "DY")]
        made[t.name] = gradient.T @ wide[t.name.replace("DW", "X")] if "W" in t.name else gradient.sum(0)
    return made

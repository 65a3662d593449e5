"""Backward chains for tests, written as text, and what autograd would compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import sass
import torch
from compiled import compile_source

from tilestream import cuda
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, Stage
from tilestream.ir.read import axes, program, tensors


def chain(
    *widths: int,
    ctas: int = 2,
    bias: bool = False,
    dx: bool = True,
    dtype: str = "f16",
    weight: str = "",
    slope: str = "relu",
    residual: bool = False,
) -> Pipeline:
    """An MLP of these widths, input first, an activation behind each layer but the last.

    Tensors: DY; of layer n, the first one 0: X<n>, W<n>, DW<n>, DB<n>; DX, which is R more if there is a ``residual``.
    ``slope``: of "relu", "gelu" (whose Z<n> is what GELU was taken of), "made" (the same, and X<n> is made of it;
    without dX, X0 as well) or "" (none).
    """
    layers = list(enumerate(pairwise(widths)))
    names = axes("rows " + " ".join(f"w{n}={size}" for n, size in enumerate(widths)))
    weight = weight or dtype
    last = len(layers)
    text = [f"g{last}[rows,w{last}]:{dtype} = load DY[rows,w{last}]"]
    told = [f"DY[rows,w{last}]:{dtype}"]
    for n, (_, _) in reversed(layers):
        o, k, g = f"w{n + 1}", f"w{n}", f"g{n + 1}"
        is_made = slope == "made" and (n > 0 or not dx)
        text += [
            f"z{n}[rows,{k}]:{dtype} = load Z{n}[rows,{k}]" if is_made or (n and slope == "gelu") else "",
            f"x{n}[rows,{k}]:{dtype} = gelu z{n}" if is_made else f"x{n}[rows,{k}]:{dtype} = load X{n}[rows,{k}]",
            f"dw{n}[{o},{k}]:f32 = product {g} x{n}",
            f"dw{n} -> DW{n}[{o},{k}]",
        ]
        told += [f"{'Z' if is_made else 'X'}{n}[rows,{k}]:{dtype}", f">DW{n}[{o},{k}]:{weight}"]
        if bias:
            text += [f"db{n}[{o}]:f32 = sum {g}", f"db{n} -> DB{n}[{o}]"]
            told.append(f">DB{n}[{o}]:f32")
        if n == 0 and not dx:
            break
        told.append(f"W{n}[{o},{k}]:{dtype}")
        made = f"p{n}" if (n and slope) or (n == 0 and residual) else f"g{n}"
        text.append(f"{made}[rows,{k}]:{dtype} = product {g} W{n}[{o},{k}]")
        if n == 0 and residual:
            text += [f"r[rows,{k}]:{dtype} = load R[rows,{k}]", f"g0[rows,{k}]:{dtype} = add r p0"]
            told.append(f"R[rows,{k}]:{dtype}")
        if n == 0:
            text.append(f"g0 -> DX[rows,{k}]")
            told.append(f">DX[rows,{k}]:{dtype}")
        elif slope == "relu":
            text.append(f"g{n}[rows,{k}]:{dtype} = relu_backward p{n} x{n}")
        elif slope:
            text += [
                f"s{n}[rows,{k}]:f32 = gelu_slope z{n}",
                f"g{n}[rows,{k}]:{dtype} = mul p{n} s{n}",
            ]
            told += [f"Z{n}[rows,{k}]:{dtype}"] if slope == "gelu" else []
    mesh = (Spread(Level.GRID, ctas, ("rows",)), Spread(Level.WARPGROUP, 2, ("rows",)))
    stage = Stage("chain", program("\n".join(text), names), (Loop("rows", 64),), mesh)
    return Pipeline("chain", tensors(" ".join(told), names), (stage,))


def data(p: Pipeline, rows: int, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random inputs; X of hidden layers as a ReLU leaves it; weights that keep the signal of order one."""
    torch.manual_seed(seed)
    made = {}
    for t in p.tensors:
        if t.role is Role.OUTPUT:
            continue
        shape = [rows if n is None else n for n in (a.size for a in t.axes)]
        x = torch.randn(shape, device=device)
        x = x * (2 / shape[0]) ** 0.5 if t.role is Role.PARAMETER else x
        x = x.relu() if t.name[0] == "X" and t.name != "X0" else x
        made[t.name] = x.to(TORCH_DTYPES[t.dtype])
    return made


def eager(p: Pipeline, given: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """As autograd computes them, in ``dtype`` (float64 for exact ones) or that of the inputs."""
    have = {name: t if dtype is None else t.to(dtype) for name, t in given.items()}
    outputs = {t.name: TORCH_DTYPES[t.dtype] for t in p.by_role(Role.OUTPUT)}
    layers = sorted((int(name[2:]) for name in outputs if name.startswith("DW")), reverse=True)
    dy, made = have["DY"], {}
    have |= {
        f"X{name[1:]}": torch.nn.functional.gelu(t)
        for name, t in have.items()
        if name[0] == "Z" and f"X{name[1:]}" not in have
    }
    for n in layers:
        made[f"DW{n}"] = dy.t() @ have[f"X{n}"]
        if f"DB{n}" in outputs:
            made[f"DB{n}"] = dy.sum(0, dtype=torch.float32 if dtype is None else dtype)
        if f"W{n}" not in have:
            break
        dy = dy @ have[f"W{n}"]
        if f"Z{n}" in have:
            dy = torch.ops.aten.gelu_backward(dy, have[f"Z{n}"])
        elif n and any(op.kind == "relu_backward" for op in p.stages[0].ops):
            dy = torch.where(have[f"X{n}"] > 0, dy, torch.zeros_like(dy))
    if "DX" in outputs:
        made["DX"] = dy + have["R"] if "R" in have else dy
    return made if dtype is not None else {name: t.to(outputs[name]) for name, t in made.items()}


def widths(hidden: int, width: int = 64, out: int = 16) -> Sequence[int]:
    """tiny-cuda-nn's MLP: ``hidden`` layers of ``width``, an output of 16."""
    return [width] * (hidden + 1) + [out]


def checked_code(pipeline: Pipeline) -> sass.Code:
    """The machine code of a chain's kernel, which holds to the rules of all of them."""
    (source,) = cuda.sources(pipeline)
    report = compile_source(source)
    assert report.spills == 0 and report.stack == 0, report.log
    code = sass.disassemble(report.cubin)
    assert {i.name for i in code.instructions}.isdisjoint({"LDL", "STL", "LD", "ST"})
    products = [k for k, i in enumerate(code.instructions) if i.name == "HGMMA"]
    tile = code.instructions[products[0] : products[-1]]
    slow = [i for i in tile if i.name in ("MEMBAR", "ERRBAR", "LDG", "STG") and not i.opcode.endswith("ALL.CTA")]
    assert slow == []  # a fence between proxies is a barrier of the CTA alone
    assert sass.one_role_waits_at_a_named_barrier(code) == []
    return code

"""The network of an edge of EdgeConv as a program, with results of edges or summed to nodes; and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor as Array

from tilestream.ir.axes import Axis, sizes
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp

NODES = Axis("nodes")


def edge_conv(features: int, hidden: int, out: int, combine: Sequence[str] = ("max",), dtype: str = "bf16") -> Pipeline:
    """``cat(x[receivers], x[senders] - x[receivers])``, two layers.

    Args:
        combine: by what the edges of a node are summed, a result each; none: results of edges.
    """
    row = {name: Tile.of(name, n, dtype) for name, n in (("own", features), ("other", features), ("more", features))}
    row |= {
        name: Tile.of(name, n, dtype) for name, n in (("x", 2 * features), ("h", hidden), ("a", hidden), ("y", out))
    }
    ops = [
        TileOp("load", row["own"], (), ("v", "receivers")),
        TileOp("load", row["other"], (), ("v", "senders")),
        TileOp("sub", row["more"], ("other", "own")),
        TileOp("cat", row["x"], ("own", "more")),
        TileOp("linear", row["h"], ("x",), ("w0", "b0")),
        TileOp("relu", row["a"], ("h",)),
        TileOp("linear", row["y"], ("a",), ("w1", "b1")),
    ]
    tensors = [Tensor.table("v", None, features, dtype)]
    tensors += [Tensor.of(name, Role.INPUT, (), "i32") for name in ("receivers", "senders")]
    shapes = {"w0": (hidden, 2 * features), "b0": (hidden,), "w1": (out, hidden), "b1": (out,)}
    tensors += [Tensor.of(name, Role.PARAMETER, shape, dtype) for name, shape in shapes.items()]
    for how in combine:
        ops.append(TileOp("store", None, ("y",), (how, "receivers", "starts"), combine=how))
        tensors.append(Tensor(how, Role.OUTPUT, (NODES, *sizes(out)), dtype))
    if combine:
        tensors.append(Tensor("starts", Role.PARAMETER, (Axis("starts.rows"),), "i32"))
    else:
        ops.append(TileOp("store", None, ("y",), ("edges",)))
        tensors.append(Tensor.of("edges", Role.OUTPUT, (out,), dtype))
    return Pipeline(f"edge_conv{features}", tuple(tensors), (Stage.of("all", tuple(ops)),))


def tensors(program: Pipeline, counts: Array, seed: int = 0) -> dict[str, Array]:
    """Of a program of ``edge_conv``, with the given counts of edges of each node, on their device."""
    g = torch.Generator(counts.device).manual_seed(seed)
    nodes, edges, made = len(counts), int(counts.sum()), {}
    for t in program.tensors:
        shape = (nodes if t.name == "v" else edges, *t.shape) if t.role is Role.INPUT or t.name == "v" else t.shape
        if t.name == "receivers":
            made[t.name] = torch.repeat_interleave(torch.arange(nodes, device=counts.device), counts).int()
        elif t.name == "starts":
            made[t.name] = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        elif t.name == "senders":
            made[t.name] = torch.randint(nodes, (edges,), generator=g, device=counts.device).int()
        elif t.role is not Role.OUTPUT:
            scale = (
                1 / math.sqrt(t.shape[-1]) if len(t.shape) == 2 and t.role is Role.PARAMETER and t.name != "v" else 1.0
            )
            values = torch.randn(shape, generator=g, device=counts.device) * scale
            made[t.name] = values.to(TORCH_DTYPES[t.dtype])
    return made


def by_torch(given: dict[str, Array], dtype: torch.dtype) -> Array:
    """The results of edges [edges, out] by torch's operators."""
    v, w0, b0, w1, b1 = (given[name].to(dtype) for name in ("v", "w0", "b0", "w1", "b1"))
    own, other = v[given["receivers"].long()], v[given["senders"].long()]
    h = torch.nn.functional.linear(torch.cat([own, other - own], 1), w0, b0).relu()
    return torch.nn.functional.linear(h, w1, b1)


def at_nodes(edges: Array, given: dict[str, Array], how: str) -> Array:
    """What the edges of each node sum to [nodes, out]; 0 of none."""
    named = {"sum": "sum", "max": "amax", "min": "amin"}[how]
    out = edges.new_zeros(len(given["starts"]) - 1, edges.shape[1])
    places = given["receivers"].long()[:, None].expand_as(edges)
    return out.scatter_reduce(0, places, edges, named, include_self=how == "sum")

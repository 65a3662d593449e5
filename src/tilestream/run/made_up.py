"""Values that stand for a user's where candidates are timed: like them in all that decides times, but random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilestream.graph.region import EdgeArguments, Region
from tilestream.graph.rewrites.busy import busy_list
from tilestream.graph.rewrites.operators import LONG
from tilestream.graph.sizes import hint
from tilestream.plan.chooser import NotTimedNow

MEMORY_SHARE = 0.4
"""Of the free device memory, what values that are made up may take. Assumed: the rest is for kernels' own."""
QUOTIENTS = {"div": 2, "reciprocal": 1, "log": 1}
"""Ops, of so many tiles, whose results have no bound near zero."""


def check_room(size: int, device: torch.device) -> None:
    """Refuse to make up more values than there is room for, ``size`` in bytes.

    Raises:
        NotTimedNow: it is more than ``MEMORY_SHARE`` of the free memory of ``device``.
    """
    free = torch.cuda.mem_get_info(device)[0]
    if size > MEMORY_SHARE * free:
        raise NotTimedNow(
            f"{size} bytes of values, made up for timing, are more than {MEMORY_SHARE:.0%} of {free} free ones",
            "leave the GPU more memory",
        )


def random_arguments(region: Region) -> list[Any]:
    """Values for ``region.arguments``: constants as they are, sizes of the call that was captured, normal numbers.

    Weights are scaled so that activations stay of order one. Where the program divides, what is no weight is positive:
    sums of both signs come near zero, and no kernel is right about quotients of those.
    """
    divides = any(op.kind in QUOTIENTS and len(op.ins) == QUOTIENTS[op.kind] for op in region.program.stages[0].ops)
    loads = [op for op in region.program.stages[0].ops if op.index]
    tables = {op.params[0] for op in loads}
    weights = {
        p.index for p in region.parameters if len(region.program.tensor(p.tensor).shape) == 2 and p.tensor not in tables
    }
    values: list[Any] = []
    fixed: set[int] = set()
    generator = torch.Generator(region.device).manual_seed(0)
    for index, node in enumerate(n for n in region.graph.graph.nodes if n.op == "placeholder"):
        fake = node.meta["val"]
        if "constant" in node.meta:
            fixed.add(index)
            values.append(node.meta["constant"])
            continue
        if not isinstance(fake, torch.Tensor):
            values.append(hint(fake))
            continue
        scale = 1 / math.sqrt(region_width(region, index)) if index in weights else 1.0
        values.append(random_tensor(fake, generator, scale, positive=divides and index not in weights))
    if region.edges is not None:
        _make_edges(region, values, generator)
        return values
    heights = {p.tensor: values[p.index].shape[0] for p in region.parameters if p.tensor in tables}
    for operand in region.inputs:  # rows from all over the table: the same again and again would stay near
        least = min((heights[op.params[0]] for op in loads if op.index == operand.tensor), default=0)
        if least and operand.index not in fixed:
            values[operand.index].random_(0, least, generator=generator)
    return values


def _make_edges(region: Region, values: list[Any], generator: torch.Generator) -> None:
    """Write random lists of edges into values, and what was made of them."""
    given = region.edges
    assert given is not None
    if given.order < 0:
        return _make_bounds(given, _edges(region, values), values, generator)
    nodes, order = len(values[given.starts]) - 1, values[given.order]
    index = torch.zeros_like(order) if given.receivers < 0 else values[given.receivers]
    if not len(order) or not nodes:
        values[given.starts].zero_()
        return
    index.random_(0, nodes, generator=generator)
    made = torch.ops.tilestream.segments(index, nodes)
    for at, tensor in zip((given.order, given.starts, given.busy), made, strict=True):
        if at >= 0:
            values[at] = tensor
    for raw, ordered, rows in given.sources:
        if raw != given.receivers:
            values[raw].random_(0, max(1, rows), generator=generator)
        values[ordered] = torch.ops.tilestream.sorted_index(values[raw], values[given.order], rows)


def _edges(region: Region, values: list[Any]) -> int:
    """Of what the program reads of each edge."""
    of_edges = (o for o in region.inputs if region.program.tensor(o.tensor).axes[0].name in region.program.ragged)
    return max(len(values[o.index]) for o in of_edges)


def _make_bounds(given: EdgeArguments, edges: int, values: list[Any], generator: torch.Generator) -> None:
    """The same for edges that lie side by side, equally many of each node."""
    starts = values[given.starts]
    starts.copy_(torch.linspace(0, edges, len(starts), device=starts.device, dtype=torch.float64))
    for raw, ordered, rows in given.sources:
        values[raw].random_(0, max(1, rows), generator=generator)
        if ordered != raw:
            values[ordered] = values[raw].to(values[ordered].dtype)
    if given.busy >= 0:
        values[given.busy] = busy_list(_do, starts, edges // LONG, len(starts) - 2, starts.device)


def _do(target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return target(*args, **kwargs)


def random_tensor(
    fake: torch.Tensor, generator: torch.Generator | None = None, scale: float = 1.0, positive: bool = False
) -> torch.Tensor:
    """A real tensor with the sizes, strides, dtype and device of ``fake``: normal numbers, zeros where integers.

    Strides may be any: transposed, with gaps, or zero, as an expanded tensor has. Zeros are indices that exist.
    """
    shape, strides = [hint(d) for d in fake.shape], [hint(d) for d in fake.stride()]
    held = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if fake.dtype.is_floating_point:
        normal = torch.randn(held, device=fake.device, generator=generator)
        memory = (scale * (normal.abs() if positive else normal)).to(fake.dtype)
    else:
        memory = torch.zeros(held, device=fake.device, dtype=fake.dtype)
    return memory.as_strided(shape, strides)


def normals(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Makes normal numbers of a shape, ``dtype`` unless another is named: the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    return normal


def region_width(region: Region, index: int) -> int:
    """Input features of the weight that is argument ``index``."""
    operand = next(p for p in region.parameters if p.index == index)
    return region.program.tensor(operand.tensor).shape[-1]

"""``tilestream::weight_gradient``: what stands for a weight's gradient, and its bias's, in a backward graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import fx

from tilestream import devices
from tilestream.devices import Device
from tilestream.graph.gradients import GradientSite, find_gradients
from tilestream.graph.nodes import aten
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.plan.gradients import Gradient, weight_gradients
from tilestream.run.executable import Enqueue, executable

LEAST_ROWS = 16_384
"""Rows from which on a gradient is streamed: two tiles and more a CTA. Assumed; no measurement has set it yet."""

_NAMES = {TORCH_DTYPES[name]: name for name in ("bf16", "f16")}
_library = torch.library.Library("tilestream", "FRAGMENT")
_library.define(
    "weight_gradient(Tensor gradient, Tensor input, bool bias, str hardware) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
WEIGHT_GRADIENT = torch.ops.tilestream.weight_gradient.default
"""What stands in a graph: ``[gradient.T @ input, sum of gradient over rows]``, the latter with ``bias``."""


@lru_cache(maxsize=256)
def pipeline_for(out: int, k: int, bias: bool, dtype: str, hardware: Device) -> Pipeline:
    """One layer's gradients on all SMs of ``hardware``."""
    layer = Gradient("dy", "x", "dw", out, k, "db" if bias else "", dtype, dtype, dtype)
    return weight_gradients(f"gradient_{out}_{k}", [layer], hardware)


@lru_cache(maxsize=256)
def _bound(pipeline: Pipeline, device: torch.device, rows: int) -> Enqueue:
    """The pipeline for ``rows`` rows; it keeps what it enqueued at the addresses of earlier calls."""
    kind = "cuda" if device.type == "cuda" else "reference"
    names = [t.name for t in pipeline.by_role(Role.OUTPUT)]
    return executable(pipeline, kind, device).bind({}, rows, written=("dy", "x", *names))


def run(gradient: torch.Tensor, given: torch.Tensor, bias: bool, hardware: str) -> list[torch.Tensor]:
    """The gradients of one layer, by a kernel, or by the reference machine where the tensors are on the CPU.

    Raises:
        CompileError, DeviceError, QueueTimeout: as ``cuda.build`` and the call of what it makes.
    """
    (rows, out), k = gradient.shape, given.shape[1]
    made = shapes(gradient, given, bias, hardware)
    if not rows:
        return [t.zero_() for t in made]
    pipeline = pipeline_for(out, k, bias, _NAMES[gradient.dtype], devices.get(hardware))
    with torch.cuda.device_of(gradient):
        _bound(pipeline, gradient.device, rows)((_addressable(gradient), _addressable(given), *made))
    return made


def _addressable(t: torch.Tensor) -> torch.Tensor:
    """Rows that kernels can read: what starts at an odd address is copied."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def shapes(gradient: torch.Tensor, given: torch.Tensor, bias: bool, hardware: str) -> list[torch.Tensor]:
    """The results without values."""
    out, k = gradient.shape[1], given.shape[1]
    return [gradient.new_empty((out, k)), *([gradient.new_empty((out,))] if bias else [])]


_library.impl("weight_gradient", run, "CompositeExplicitAutograd")
torch.library.register_fake("tilestream::weight_gradient", shapes, lib=_library)


def stream_gradients(owner: fx.GraphModule, hardware: Device, least_rows: int = LEAST_ROWS) -> list[GradientSite]:
    """Put calls in the place of the graph's weight gradients of many rows, each with its bias's; says which.

    One launch a layer: several in one would keep every layer's gradient alive until the last is there.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    streamed = [s for s in find_gradients(owner.graph) if s.rows >= least_rows and _fits(s, hardware)]
    for site in streamed:
        _replace(owner.graph, site, hardware)
    if streamed:
        stable_topological_sort(owner.graph)  # a sum's users may stand before the product
        owner.graph.eliminate_dead_code()
        owner.graph.lint()
        owner.recompile()
    return streamed


def _fits(site: GradientSite, hardware: Device) -> bool:
    """Whether every block of the gradient has an SM: wider layers are the library's."""
    return prod(Gradient("", "", "", site.out, site.k).parts) <= hardware.sms


def _replace(graph: fx.Graph, site: GradientSite, hardware: Device) -> None:
    """The call stands where the product stood."""
    with graph.inserting_before(site.product):
        call = graph.call_function(WEIGHT_GRADIENT, (site.gradient, site.input, site.total is not None, hardware.name))
    out = [site.product.meta["val"], *([site.gradient.meta["val"][0]] if site.total is not None else [])]
    call.meta = {"val": out, "stack_trace": site.product.meta.get("stack_trace")}
    _use(graph, call, 0, site.product)
    if site.total is not None:
        _use(graph, call, 1, site.total)


def _use(graph: fx.Graph, call: fx.Node, index: int, node: fx.Node) -> None:
    """``node``'s users get the call's result in its shape."""
    with graph.inserting_before(node):
        part = graph.call_function(operator.getitem, (call, index))
        part.meta = dict(node.meta)
        shape: Sequence[int] = node.meta["val"].shape
        if index and len(shape) == 2:  # a sum that keeps its dimension
            part = graph.call_function(aten.reshape.default, (part, list(shape)))
            part.meta = dict(node.meta)
    node.replace_all_uses_with(part)
    graph.erase_node(node)

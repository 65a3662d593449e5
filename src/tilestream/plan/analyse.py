"""The analysis of a model: captured, examined, and examined again in lower precisions where those would help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilestream import devices
from tilestream.devices import Device
from tilestream.errors import TilestreamError
from tilestream.graph.capture import Captured, capture
from tilestream.graph.cut import Cutter
from tilestream.graph.decode import STEP
from tilestream.graph.depthwise import DEPTHWISE
from tilestream.graph.fake import fake_tensor, faked, twin
from tilestream.graph.rewrites.settings import Settings
from tilestream.ir.float32 import by_parts
from tilestream.options import Options
from tilestream.plan import decode, messages
from tilestream.plan.analysis import Alternative, Analysis
from tilestream.plan.gradient_launches import least_rows
from tilestream.plan.interaction import JOINT_INTERACTIONS, TARGETS
from tilestream.plan.predicted import of_graphs
from tilestream.plan.replacements import REPLACEMENTS


def analyse(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options | None = None,
    device: Device | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    training: bool = False,
    sums: bool = True,
) -> Analysis:
    """Capture ``model(*inputs, **keywords)``, select regions, and plan each for ``device``.

    Nothing is computed, as ``capture`` says. ``device=None`` means ``options.device``, else the GPU present,
    else ``h200``.

    Args:
        training: with gradients: forward and backward graphs.
        sums: whether those by an index are made in sorted order where that pays.

    Raises:
        CaptureError: Dynamo could not capture the model.
        DeviceError: no device of that name is known.
    """
    options = options or Options()
    device = device or devices.planned_for(options.device)
    cut = training_cut(options, device, sums) if training else None
    told: list[str] = []
    found = capture(model, inputs, keywords, training, cut, options.attention)
    may_step = options.decode_step and not training and (options.measure or options.target == "reference")
    if may_step and any(map(decode.writes_cache, found.graphs)):
        change = partial(decode.expected, device=device, told=told.append)
        stepped = capture(model, inputs, keywords, masks=options.attention, change=change)
        found = stepped if any(decode.steps_of(graph.graph) for graph in stepped.graphs) else found
    for graph, kind in zip(found.graphs, found.kinds, strict=True):
        if kind == "inference":
            for each in REPLACEMENTS:
                each.place_expected(graph, options, device)
    made = of_graphs(model, found, options, device, training, sums)
    made = replace(made, hints=(*made.hints, *told))
    targets = {n.target for graph in found.graphs for n in graph.graph.nodes}
    if STEP in targets:
        other = analyse(model, inputs, replace(options, decode_step=False), device, keywords=keywords, sums=sums)
        if options.target != "reference" and _is_faster(other, made):
            left = f"with its decode step as one kernel it is predicted to take {made.whole.predicted_us:.0f} us"
            return replace(other, options=options, hints=(*other.hints, left))
        made = replace(made, plain_graphs=other.plain_graphs or other.graphs)
    elif targets & {*TARGETS, *messages.TARGETS, DEPTHWISE}:
        apart = replace(options, interactions=False, convolutions="off")
        plain = analyse(model, inputs, apart, device, keywords=keywords, training=training, sums=False)
        made = replace(made, plain_graphs=plain.graphs)
    return replace(made, float32=alternatives(made, found, model, inputs, keywords or {}))


def _is_faster(other: Analysis, stepped: Analysis) -> bool:
    return not other.empty and not stepped.empty and other.whole.predicted_us < stepped.whole.predicted_us


def training_cut(options: Options, device: Device, sums: bool = True) -> Cutter:
    """What cuts joint graphs, as a compilation does."""
    settings = Settings(least_rows(options), sums=messages.sums_of_training if sums else None)
    return Cutter(settings, lambda joint: JOINT_INTERACTIONS.place_expected(joint, options, device))


TF32 = 'torch.set_float32_matmul_precision("high")'
BF16 = "model.bfloat16(), and x.bfloat16() for its inputs"


def alternatives(
    made: Analysis, found: Captured, model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Alternative, ...]:
    """tf32 and bf16, where torch's float32 precision keeps linear layers of ``made`` from less exact products; else
    none."""
    kept = any("float32 matmul" in e.reason for e in made.exclusions)
    if not kept and not any(by_parts(r.program) for r in made.regions):
        return ()
    with _precision("high"):
        tf32 = _planned("tf32", TF32, made, found, model)
    return (tf32, _bf16(made, model, inputs, keywords))


def _bf16(made: Analysis, model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Alternative:
    if not isinstance(model, nn.Module):
        return Alternative("bf16", "bf16 weights and inputs", problem="a function: its weights cannot be converted")
    try:
        mode, given, named = faked(model, inputs, keywords)
        given, named = tree_map_only(torch.Tensor, lambda x: fake_tensor(x, mode, torch.bfloat16), (given, named))
        small = twin(model, mode, torch.bfloat16)
        return _planned("bf16", BF16, made, capture(small, given, named, made.training), small)
    except (TilestreamError, RuntimeError, TypeError, ValueError) as failure:  # a lazy layer, a __deepcopy__ of its own
        return Alternative("bf16", BF16, problem=str(failure).splitlines()[0])


def _planned(name: str, write: str, made: Analysis, found: Captured, model: Callable[..., Any]) -> Alternative:
    assert made.hardware is not None
    other = of_graphs(model, found, made.options, made.hardware, made.training)
    return Alternative(name, write, other.coverage, other.predicted_us, other.inductor_predicted_us)


@contextlib.contextmanager
def _precision(wanted: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""The analysis of a model: captured, examined, and examined again in lower precisions where those would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tilestream import devices
from tilestream.devices import Device
from tilestream.graph.capture import capture
from tilestream.graph.cut import Cutter
from tilestream.graph.decode import STEP
from tilestream.graph.depthwise import DEPTHWISE
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.token_mixing import TOKEN_MIXING
from tilestream.options import Options
from tilestream.plan import decode, messages, precision
from tilestream.plan.analysis import Analysis
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
    elif targets & {*TARGETS, *messages.TARGETS, DEPTHWISE, TOKEN_MIXING}:
        apart = replace(options, interactions=False, convolutions="off", token_mixing=False)
        plain = analyse(model, inputs, apart, device, keywords=keywords, training=training, sums=False)
        made = replace(made, plain_graphs=plain.graphs)
    return replace(made, float32=precision.alternatives(made, found, model, inputs, keywords or {}))


def _is_faster(other: Analysis, stepped: Analysis) -> bool:
    return not other.empty and not stepped.empty and other.whole.predicted_us < stepped.whole.predicted_us


def training_cut(options: Options, device: Device, sums: bool = True) -> Cutter:
    """What cuts joint graphs, as a compilation does."""
    settings = Settings(least_rows(options), sums=messages.sums_of_training if sums else None)
    return Cutter(settings, lambda joint: JOINT_INTERACTIONS.place_expected(joint, options, device))

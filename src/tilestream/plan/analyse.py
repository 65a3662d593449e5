"""The analysis of a model: captured, examined, and examined again in lower precisions where those would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilestream import devices
from tilestream.devices import Device
from tilestream.graph.capture import capture
from tilestream.graph.cut import Cutter
from tilestream.graph.depthwise import DEPTHWISE
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.token_mixing import TOKEN_MIXING
from tilestream.options import Options
from tilestream.plan import messages, patches, precision, token_mixing
from tilestream.plan.analysis import Analysis
from tilestream.plan.depthwise import take_expected
from tilestream.plan.gradient_launches import least_rows
from tilestream.plan.interaction import TARGETS, place_expected
from tilestream.plan.predicted import of_graphs


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
    found = capture(model, inputs, keywords, training, training_cut(options, device, sums) if training else None)
    for graph, kind in zip(found.graphs, found.kinds, strict=True):
        if kind == "inference":
            place_expected(graph, False, options, device)
            patches.place_expected(graph, options, device)
            take_expected(graph, options, device)
            token_mixing.place_expected(graph, options, device)
    made = of_graphs(model, found, options, device, training, sums)
    ours = (*TARGETS, *messages.TARGETS, DEPTHWISE, TOKEN_MIXING)
    if any(n.target in ours for graph in found.graphs for n in graph.graph.nodes):
        apart = replace(options, interactions=False, convolutions="off", token_mixing=False)
        plain = analyse(model, inputs, apart, device, keywords=keywords, training=training, sums=False)
        made = replace(made, plain_graphs=plain.graphs)
    return replace(made, float32=precision.alternatives(made, found, model, inputs, keywords or {}))


def training_cut(options: Options, device: Device, sums: bool = True) -> Cutter:
    """What cuts joint graphs, as a compilation does."""
    settings = Settings(least_rows(options), sums=messages.sorted_sums if sums else None)
    return Cutter(settings, lambda joint: place_expected(joint, True, options, device))

"""What is special about a capture, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from tilestream.graph.capture import Captured
from tilestream.graph.provenance import source
from tilestream.graph.rewrites.kept import argument_of
from tilestream.graph.rewrites.operators import SEGMENTS


def hints(model: Callable[..., Any], found: Captured, training: bool) -> tuple[str, ...]:
    """A line for each thing that the user should know of a capture."""
    made = []
    changing = dict.fromkeys(changing_in_training(model))
    if changing and not training:
        made.append(f"{', '.join(changing)} in train mode: call model.eval() for inference")
    if not training and _wants_gradients(model):
        made.append(
            "inference graphs, as under torch.no_grad(): called with gradients, the model makes forward and backward "
            "graphs, which training=True shows"
        )
    if found.ran:
        made.append(f"the model was run to capture it: {found.ran}")
    if not found.graphs:
        made.append("torch.compile captures nothing of this model: all of it runs eagerly")
    if any("_transformer_encoder_layer_fwd" in str(n.target) for g in found.graphs for n in g.graph.nodes):
        made.append(
            "nn.TransformerEncoder took its fast path, one operator a layer: "
            "torch.backends.mha.set_fastpath_enabled(False) shows its layers, which can stream"
        )
    return tuple(made)


def kept_lists(found: Captured) -> tuple[str, ...]:
    """Which sorts of edges, in graphs that have them, a later call need not make: none of a backward graph."""
    calls = [g.graph for g, kind in zip(found.graphs, found.kinds, strict=True) if kind != "backward"]
    sorts = [n for graph in calls for n in graph.find_nodes(op="call_function", target=SEGMENTS)]
    kept = [n for n in sorts if isinstance(n.args[0], fx.Node) and argument_of(n.args[0]) is not None]
    where = ", ".join(dict.fromkeys(f"{n.name} ({source(n) or 'no source line'})" for n in kept))
    said = f"sorted lists that are kept from call to call while they do not change, outside of CUDA graphs: {where}"
    return (said,) if kept else ()


def _wants_gradients(model: Callable[..., Any]) -> bool:
    """Whether a call of the model, here and now, would make a training graph."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return torch.is_grad_enabled() and any(p.requires_grad for p in parameters)


def changing_in_training(model: Callable[..., Any]) -> list[str]:
    """Types of the modules in train mode that compute something else there: dropout, and batch statistics."""
    return [
        f"nn.{type(m).__name__}"
        for m in (model.modules() if isinstance(model, nn.Module) else ())
        if m.training and (isinstance(m, _NormBase) or (isinstance(m, _DropoutNd) and m.p > 0))
    ]

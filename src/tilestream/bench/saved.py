"""Bytes of a training step's activations: by Inductor's partition, and by ours.

What is kept from the forward to the backward graph, and what lives at most while the backward graph runs in its order.
Both are counted on graphs, nothing is computed: a GPU is not needed, and modules may be on the meta device.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilestream import devices
from tilestream.graph import interaction
from tilestream.graph.cut import Cutter
from tilestream.graph.live import storage, tensor_bytes
from tilestream.graph.nodes import is_view
from tilestream.graph.recompute import saved_bytes
from tilestream.graph.rewrites.settings import Settings
from tilestream.options import Options
from tilestream.plan.find import find
from tilestream.run.place import place

Cut = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True)
class Bytes:
    """``saved`` from forward to backward besides parameters, inputs and results; ``peak`` of the backward graph."""

    saved: int
    peak: int


@dataclass(frozen=True)
class Saved:
    """What a step takes by Inductor and by us."""

    inductor: Bytes
    ours: Bytes


def saved(model: Callable[..., Any], inputs: Sequence[Tensor], least_rows: int = 1) -> Saved:
    """What one call of ``model`` takes. Inductor's part: its decompositions and its minimum cut, without its patterns
    for attention and before it fuses."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def place_interactions(joint: fx.GraphModule) -> None:
        for site in interaction.find_interactions(joint.graph, joint=True):
            interaction.place(joint, site)

    cut = Cutter(Settings(least_rows), place_interactions)
    inductor = _counted(model, inputs, min_cut_rematerialization_partition, select_decomp_table(), _peak)
    return Saved(inductor, _counted(model, inputs, cut, {}, _streamed_peak))


def _peak(backward: fx.GraphModule) -> int:
    return peak(backward.graph)


def _streamed_peak(backward: fx.GraphModule) -> int:
    """The peak of a backward graph with calls in the place of its regions."""
    own = fx.GraphModule(backward, copy.deepcopy(backward.graph))
    own.meta = dict(backward.meta)
    found = find(own, "backward", Options(), devices.get("h200"))
    place(found.graph, found, lambda region: region.program, "reference")
    return peak(found.graph.graph)


def _counted(
    model: Callable[..., Any],
    inputs: Sequence[Tensor],
    cut: Cut,
    decompositions: dict[Any, Any],
    peak_of: Callable[[fx.GraphModule], int],
) -> Bytes:
    from torch._dynamo.backends.common import aot_autograd

    found: list[Bytes] = []

    def counting(joint: fx.GraphModule, given: Sequence[object], **kwargs: Any) -> tuple[Any, Any]:
        forward, backward = cut(joint, given, **kwargs)
        found.append(Bytes(saved_bytes(forward, kwargs["num_fwd_outputs"]), peak_of(backward)))
        return forward, backward

    def run(graph: fx.GraphModule, _: Sequence[object]) -> Callable[..., Any]:
        def call(args: list[Any]) -> Any:
            return fx.Interpreter(graph).run(*args)

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=run, bw_compiler=run, inference_compiler=run, partition_fn=counting, decompositions=decompositions
    )
    torch.compile(model, backend=backend)(*inputs)
    return Bytes(sum(b.saved for b in found), max((b.peak for b in found), default=0))


def peak(graph: fx.Graph) -> int:
    """Bytes that live at most while a graph runs in its order, besides the user's inputs and parameters.

    Counted of results as they are handed on, each freed after its last reader; fusion of what is left makes it less.
    """
    nodes = list(graph.nodes)
    last = {storage(n): time for time, node in enumerate(nodes) for n in node.all_input_nodes}
    frees: dict[int, int] = {}
    live = most = 0
    for time, node in enumerate(nodes):
        if node.op == "placeholder" and node.name.startswith("primals"):
            continue
        if node.op not in ("placeholder", "call_function") or is_view(node) or node.target is operator.getitem:
            continue
        for part in [u for u in node.users if u.target is operator.getitem] or [node]:
            live += tensor_bytes(part)
            frees[last.get(part, time)] = frees.get(last.get(part, time), 0) + tensor_bytes(part)
        most = max(most, live)
        live -= frees.pop(time, 0)
    return most

"""Bytes that a training step keeps from its forward to its backward graph: by Inductor's partition, and by ours.

Both are counted on graphs, nothing is computed: a GPU is not needed, and modules may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.cut import Cutter
from tilestream.graph.interaction import place_all
from tilestream.graph.recompute import saved_bytes

Cut = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True)
class Saved:
    """Bytes besides parameters, inputs and results."""

    inductor: int
    ours: int


def saved(model: Callable[..., Any], inputs: Sequence[Tensor], least_rows: int = 1) -> Saved:
    """What one call of ``model`` saves. Inductor's part: its decompositions and its minimum cut, without its patterns
    for attention."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    inductor = _counted(model, inputs, min_cut_rematerialization_partition, select_decomp_table())
    ours = Cutter(least_rows)

    def cut(joint: fx.GraphModule, given: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        place_all(joint, joint=True)
        return ours(joint, given, **kwargs)

    return Saved(inductor, _counted(model, inputs, cut, {}))


def _counted(model: Callable[..., Any], inputs: Sequence[Tensor], cut: Cut, decompositions: dict[Any, Any]) -> int:
    from torch._dynamo.backends.common import aot_autograd

    found: list[int] = []

    def counting(joint: fx.GraphModule, given: Sequence[object], **kwargs: Any) -> tuple[Any, Any]:
        forward, backward = cut(joint, given, **kwargs)
        found.append(saved_bytes(forward, kwargs["num_fwd_outputs"]))
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
    return sum(found)

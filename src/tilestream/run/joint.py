"""Between forward and backward: Inductor's partitioner, on a joint graph that has less to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from tilestream.graph.joint import split_joined
from tilestream.plan.gradient_launches import least_rows
from tilestream.run.graphs import Compilation


def partitioner(compilation: Compilation) -> dict[str, Any]:
    """Inductor's configuration that lets ``Partitioner`` cut a joint graph; none where the user has one already."""
    from torch._inductor import config

    if getattr(config, "custom_partitioner_fn", None) is not None:
        return {}
    return {"custom_partitioner_fn": Partitioner(compilation)}


class Partitioner(CustomPartitionerFn):
    """Rewrites the joint graph (``graph.joint``), then cuts it where Inductor does. Kernels of both parts begin to be
    compiled then: the forward graph alone would keep few cores busy."""

    _compilation: Compilation | None = None
    """None in copies that Inductor makes of its configuration for the keys of its caches. They are never called."""

    def __init__(self, compilation: Compilation) -> None:
        self._least_rows, self._identity = least_rows(compilation.options), compilation.identity
        self._compilation = compilation

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_compilation"}

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        if split_joined(gm.graph, self._least_rows):
            gm.recompile()
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if self._compilation is not None:
            self._compilation.prepare(forward, backward)
        return forward, backward

    def uuid(self) -> str:
        """What torch's caches know it by."""
        return self._identity

"""Between forward and backward: a partitioner of ours (``graph.cut``), by Inductor's own hook for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from tilestream.graph.cut import Cutter
from tilestream.graph.rewrites.settings import Settings
from tilestream.plan.gradient_launches import least_rows
from tilestream.plan.messages import sums_of_training
from tilestream.run import device_ops
from tilestream.run.graphs import Compilation


def partitioner(compilation: Compilation, alone: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's configuration that lets ``Partitioner`` cut a joint graph; none where the user has one already.

    ``alone``: its configuration for graphs that it compiles by themselves, as those that regions are timed against.
    """
    from torch._inductor import config

    if getattr(config, "custom_partitioner_fn", None) is not None:
        return {}
    return {"custom_partitioner_fn": Partitioner(compilation, alone)}


class Partitioner(CustomPartitionerFn):
    """``Cutter`` under the name that torch's caches know a compilation by, which sorts messages.
    Both parts are planned when a graph is cut, as kernels come: the forward graph alone would keep few cores busy.
    """

    _compilation: Compilation | None = None
    """None in copies that Inductor makes of its configuration for the keys of its caches. They are never called."""

    def __init__(self, compilation: Compilation, alone: Mapping[str, Any] | None = None) -> None:
        self._cut = Cutter(Settings(least_rows(compilation.options), sums=sums_of_training))
        self._identity = compilation.identity
        self._alone = dict(alone or {})
        self._compilation = compilation

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_compilation"}

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        compilation = self._compilation
        if compilation is not None:
            from torch._inductor import config

            with config.patch(self._alone):
                compilation.stream_joint(gm, kwargs["num_fwd_outputs"])  # first: what it joins is no concatenation then
        forward, backward = self._cut(gm, joint_inputs, **kwargs)
        device_ops.begin(gm.graph)
        if compilation is not None:
            with config.patch(self._alone):
                compilation.prepare(forward, backward)
        return forward, backward

    def uuid(self) -> str:
        """What torch's caches know it by."""
        return self._identity

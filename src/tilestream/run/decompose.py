"""An ATen graph in the operators that Inductor lowers, where AOTAutograd was asked to keep all whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tilestream.graph.nodes import is_constant


def simplified(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """``decomposed``, and what Inductor's passes over joint graphs make of it where its configuration has them."""
    from torch._guards import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    graph = decomposed(gm, inputs)
    if not config.use_joint_graph_passes:
        return graph
    with _computing_nothing(detect_fake_mode(list(inputs))):  # as AOTAutograd runs them: they make tensors and trace
        return joint_graph_passes(graph)


def decomposed(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph traced again with Inductor's decompositions, under the fake tensors that it has."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    relift(gm)
    mode = detect_fake_mode(list(inputs))

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return _Retraced(gm).run(*args)

    with enable_python_dispatcher(), torch.no_grad(), _nothing_traced_yet(), _computing_nothing(mode):
        new = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="real")(*_each_its_own(inputs))
    for before, after in zip(
        gm.graph.find_nodes(op="placeholder"), new.graph.find_nodes(op="placeholder"), strict=True
    ):
        after._rename(before.name)  # another name, where an operator of the new graph has this one
        after.target = after.name  # an argument of the graph's code, which hides what else is called so
        after.meta = {**before.meta, **after.meta}
    (before,), (after,) = gm.graph.find_nodes(op="output"), new.graph.find_nodes(op="output")
    after.meta = {**before.meta, **after.meta}  # which outputs users see, among others
    after.args = (tuple(after.args[0]),)  # pyright: ignore[reportArgumentType]
    new.meta.update(gm.meta)
    new.graph.eliminate_dead_code()  # results that a trace takes apart and nobody wants: Inductor may not have them
    new.recompile()
    return new


class _Retraced(fx.Interpreter):
    """A view of what lies otherwise in memory than when the graph was traced is a copy. Inductor saves neighbours of a
    convolution channels last for the backward graph, and joins one tensor with none by a copy that keeps its strides.
    """

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_view = target is torch.ops.aten.view.default
        return super().call_function(torch.ops.aten.reshape.default if is_view else target, args, kwargs)


@contextlib.contextmanager
def _computing_nothing(mode: FakeTensorMode | None) -> Iterator[None]:
    """Inside, tensors have shapes alone, and constants may stand beside them; without a ``mode`` nothing changes."""
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def _each_its_own(inputs: Sequence[Any]) -> list[Any]:
    """The inputs, no two of them one object: a trace tells values apart by that, and results of a subgraph that is
    called twice (``nested_compile_region``) are saved for the backward graph as the same fake tensors."""
    seen: set[int] = set()
    own: list[Any] = []
    for value in inputs:
        own.append(value.detach() if isinstance(value, torch.Tensor) and id(value) in seen else value)
        seen.add(id(value))
    return own


@contextlib.contextmanager
def _nothing_traced_yet() -> Iterator[None]:
    """Inside, torch traces each subgraph (``nested_compile_region``) anew: it keeps what it traced by the subgraph's
    name, and that has no decompositions in it."""
    from torch._guards import HopDispatchSetCache, TracingContext

    context = TracingContext.try_get()
    if context is None:
        yield
        return
    kept, context.hop_dispatch_set_cache = context.hop_dispatch_set_cache, HopDispatchSetCache()
    try:
        yield
    finally:
        context.hop_dispatch_set_cache = kept


def relift(gm: fx.GraphModule) -> None:
    """Copy every constant before it is used, as AOTAutograd does: Inductor takes no other real tensor in a graph."""
    lift = torch.ops.aten.lift_fresh_copy.default
    for node in list(gm.graph.nodes):
        if is_constant(node) and any(user.target is not lift for user in node.users):
            with gm.graph.inserting_after(node):
                copied = gm.graph.call_function(lift, (node,))
            copied.meta = dict(node.meta)
            node.replace_all_uses_with(copied, delete_user_cb=lambda user: user.target is not lift)
    gm.recompile()

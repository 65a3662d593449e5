"""An ATen graph in the operators that Inductor lowers, where AOTAutograd was asked to keep all whole."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import is_constant


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
            return fx.Interpreter(gm).run(*args)

    with enable_python_dispatcher(), torch.no_grad(), contextlib.ExitStack() as stack:
        if mode is not None:
            stack.callback(setattr, mode, "allow_non_fake_inputs", mode.allow_non_fake_inputs)
            mode.allow_non_fake_inputs = True
            stack.enter_context(mode)
        new = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    for before, after in zip(
        gm.graph.find_nodes(op="placeholder"), new.graph.find_nodes(op="placeholder"), strict=True
    ):
        after.target = before.target
        after._rename(before.name)
        after.meta = {**before.meta, **after.meta}
    (before,), (after,) = gm.graph.find_nodes(op="output"), new.graph.find_nodes(op="output")
    after.meta = {**before.meta, **after.meta}  # which outputs users see, among others
    after.args = (tuple(after.args[0]),)  # pyright: ignore[reportArgumentType]
    new.meta.update(gm.meta)
    new.recompile()
    return new


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

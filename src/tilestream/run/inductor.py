"""One Inductor compilation of a whole graph, with regions as operators in it.

``compile_fx`` runs AOTAutograd and the partitioner without decompositions, so that ``_inner`` sees the inference,
forward and backward graphs in the operators that selection knows. It places the regions, then decomposes what is left
and hands it to Inductor: memory planning, fusion around regions, CUDA-graph trees and caches are Inductor's own.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass

from tilestream.announce import announce_failure
from tilestream.graph.attention_masks import give_ranks, settle_masks
from tilestream.graph.modules import copied
from tilestream.graph.repeated_heads import share_heads
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.run import around, epilogues, fallback
from tilestream.run.collector import young_only
from tilestream.run.decode import settle_sizes
from tilestream.run.decompose import relift, simplified
from tilestream.run.direct import DirectNote, direct, direct_note, is_direct
from tilestream.run.executable import unwanted_rest
from tilestream.run.graphs import Compilation
from tilestream.run.joint import partitioner
from tilestream.run.kept_lists import keeping
from tilestream.run.late_kernels import finished_together
from tilestream.run.stopwatch import timed
from tilestream.run.triton_driver import begin_driver
from tilestream.run.written_attention import fuse_written

log = logging.getLogger(__name__)

ALONE = {"triton.cudagraphs": False}
"""Inductor's configuration while candidates are measured: they are captured in CUDA graphs of their own."""


class NothingTakenError(Exception):
    """No region of the graph is ours: what Dynamo captured goes to Inductor as it is. Never leaves this module."""


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], compilation: Compilation) -> Any:
    """A Dynamo graph compiled once by Inductor, regions as operators; by Inductor alone where no region is taken.

    Raises:
        TilestreamError: with ``fallback=False``: why a part of the graph is not streamed.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    from tilestream.run.operator import lower_operators

    lower_operators()
    settle_parts()
    patches = dict(compilation.patches)
    if compilation.options.decode_step:
        settle_sizes(graph)
    untouched = copied(graph)
    joint_passes = bool(patches.get("use_joint_graph_passes", config.use_joint_graph_passes))
    options, identity = compilation.options, compilation.identity
    note = direct_note(options.cache_folder if options.cache else None, untouched, inputs, identity)
    cached = functorch.enable_autograd_cache and options.cache and not note.was_direct
    inner = functools.partial(_inner, compilation=compilation, joint_passes=joint_passes, note=note)
    changed: dict[str, Any] = {
        "use_joint_graph_passes": False,
        "joint_custom_pre_pass": Identity(identity, config.joint_custom_pre_pass),
        **partitioner(compilation, ALONE | {"use_joint_graph_passes": joint_passes}),
    }
    if note.was_direct:
        changed["compile_threads"] = 1  # Inductor would start processes to compile in, and has nothing to compile
    elif compilation.target.kind == "cuda":
        begin_driver()
    try:
        if options.attention:
            compilation.rewritten = bool(give_ranks(graph) + settle_masks(graph) + share_heads(graph))
        with young_only(), functorch.patch(enable_autograd_cache=cached), config.patch(changed):
            made: Any = compile_fx(graph, list(inputs), inner_compile=inner, decompositions={}, config_patches=patches)
        return keeping(made, inputs, options) if options.keeps_lists else made
    except NothingTakenError:
        log.info("no region is taken")
    except Exception as failure:
        if not compilation.options.fallback or fallback.is_dynamos(failure):
            raise
        announce_failure("the graph goes to Inductor", failure)
    return fallback.whole(untouched, list(inputs), patches)


def settle_parts() -> None:
    """Let nothing of the part before reach into this one, where a model wrapped for data parallelism is cut.

    Dynamo's ``DDPOptimizer`` asks AOTAutograd by a flag for fake results of each part's first call. An object that dies
    with the part takes the flag back: where a cycle of references holds it, that is in the midst of a later part, whose
    first call then gets fake tensors as a user's.
    """
    context = TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        gc.collect()
        context.fakify_first_call = True


class Identity(CustomGraphPass):
    """Does nothing but tell torch's caches by ``uuid`` what decides our regions: the key of a compiled graph."""

    def __init__(self, identity: str, user: Any) -> None:
        self._identity, self._user = identity, user

    def __call__(self, graph: fx.Graph) -> None:
        if self._user is not None:
            self._user(graph)

    def uuid(self) -> str | None:
        """None, no caching, where the user's own pass has no identity."""
        if self._user is None:
            return self._identity
        own = self._user.uuid() if isinstance(self._user, CustomGraphPass) else None
        return None if own is None else f"{self._identity} {own}"


def _inner(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    compilation: Compilation,
    joint_passes: bool,
    note: DirectNote,
    **kwargs: Any,
) -> Any:
    """The ``inner_compile`` of ``compile_fx``. The backward graph may come after everything above has returned."""
    from torch._inductor import config

    kwargs.pop("get_decomp_fn", None)
    backward, inference = bool(kwargs.get("is_backward")), bool(kwargs.get("is_inference"))
    made: list[tuple[Any, list[Any]]] = []

    def compiled(graph: fx.GraphModule, by_eager: bool = False, **changes: Any) -> Any:
        with timed("inductor"), unwanted_rest(compilation.target.kind):
            compiles = compile_calls if by_eager else compile_inner
            made.append(compiles(graph, inputs, {**kwargs, **changes}))
        return made[-1][0]

    with young_only(), config.patch(use_joint_graph_passes=joint_passes):
        streamed = copied(gm)
        with config.patch(ALONE):
            if inference and compilation.stream_step(gm):
                return _stepped(compilation, inputs, kwargs)
        if inference and (step := compilation.choose_step(gm, compiled, inputs, kwargs)) is not None:
            note.settle(False)
            _set_output_strides(next(strides for code, strides in made if code is step))
            return step
        with config.patch(ALONE):
            taken = compilation.stream(streamed, kwargs) or compilation.step is not None
        if compilation.target.kind == "cuda" and not backward:
            taken = taken or epilogues.would_fuse(streamed, compilation.patches, linears=inference)
            if inference and not taken:
                taken = bool(fuse_written(streamed, compilation.options, compilation.target))
        if not taken and not backward:
            raise NothingTakenError

        # A backward graph is handed values that nobody else holds; Inductor's code frees each after its last use.
        if not backward:
            calls_alone = taken and not kwargs.get("cudagraphs") and is_direct(streamed)
            note.settle(calls_alone)
            if calls_alone:
                compilation.keep(training=not inference)
                return direct(streamed)
        if taken:
            around.rewrite_around(streamed, compilation.options, compilation.target, compilation.patches, inference)
            if compilation.options.keeps_lists and not backward:
                rewrite(streamed, When.CALLED)
        rescued = backward and compilation.options.fallback

        def compiled_plainly() -> Any:
            """Without regions. A forward graph's failure goes up to ``compile_graph``; a backward graph may outlive
            its frame."""
            return fallback.or_eager(compiled, gm) if rescued else compiled(gm)

        try:
            chosen = compilation.choose(streamed, gm, compiled, inputs, kwargs) if taken else compiled_plainly()
        except Exception as failure:
            if not (taken and rescued):
                raise
            announce_failure("the backward graph goes to Inductor", failure)
            chosen = compiled_plainly()
        _set_output_strides(next((strides for code, strides in made if code is chosen), ()))
        return chosen


def _stepped(compilation: Compilation, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The compiled graph of a decode step that is one operator, which nothing is compared with."""
    assert compilation.step is not None
    code, strides = compile_inner(compilation.step[0], inputs, kwargs)
    _set_output_strides(strides)
    return code


def compile_inner(gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The compiled graph, and the strides of its outputs, which Inductor leaves in the tracing context."""
    return _compiled(simplified(gm, inputs), inputs, kwargs)


def compile_calls(gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The same of a graph whose every operator is eager's own kernel (``fallback.calls_eager``)."""
    from torch._inductor import config, list_mode_options

    graph = copied(gm)
    relift(graph)
    with config.patch(list_mode_options("lite")):
        return _compiled(graph, inputs, kwargs)


def _compiled(graph: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    from torch._inductor.compile_fx import compile_fx_inner

    _set_output_strides(())
    with finished_together():
        code = compile_fx_inner(graph, inputs, **kwargs)
    return code, list(_output_strides() or ())


def _output_strides() -> list[Any] | None:
    """Where Inductor tells AOTAutograd the strides of a graph's outputs; None outside of a compilation."""
    context = TracingContext.try_get()
    return None if context is None else context.output_strides


def _set_output_strides(strides: Sequence[Any]) -> None:
    found = _output_strides()
    if found is not None:
        found[:] = strides

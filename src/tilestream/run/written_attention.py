"""Attention that a model writes out, by a library's kernel or by ours where that is faster than Inductor's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, fx

from tilestream.announce import announced
from tilestream.devices import Device
from tilestream.graph.modules import copied
from tilestream.graph.region import extract
from tilestream.graph.rewrites.insert import call
from tilestream.graph.settled import settle
from tilestream.graph.written_attention import Written, added, described, fuse, reads_rows, short, terms, written_at
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import Question, choose
from tilestream.run import fallback, prepare
from tilestream.run.library_attention import CUDNN, EFFICIENT, FLASH, MOST_FEATURES, MOST_SCORES, added_to
from tilestream.run.made_up import random_tensor
from tilestream.run.short_attention import NAME as OURS
from tilestream.run.short_attention import predicted_us, takes
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timer import Timer, Trial

KERNELS: dict[str, tuple[Any, Callable[[fx.Node | None], tuple[Any, ...]]]] = {
    "memory-efficient attention": (EFFICIENT, lambda added: (added, False)),
    "flash attention": (FLASH, lambda _: ()),
    "cuDNN's attention": (CUDNN, lambda _: (None, False)),
}
"""Kernels, and what each takes behind query, key and value."""
WITH_BIAS = "memory-efficient attention"
"""cuDNN's makes zeros of a row whose numbers are all very small, where softmax takes the mean."""


def fuse_written(graph: fx.GraphModule, options: Options, target: Target) -> int:
    """Put a library's kernel in the place of every attention that is written out, where it wins; how many were.

    An exception of ours costs the attention, and is announced.

    Args:
        graph: functional ATen of an inference graph, with fake tensors of every node in its meta; changed in place.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    from torch._inductor import config

    if not options.attention or not prepare.measures(options, target):
        return 0
    made = 0
    for node in list(graph.graph.nodes):
        with announced("an attention that is written out goes to Inductor", options.fallback):
            site = written_at(node)
            if site is None or not _fits(site):
                continue
            with prepare.kernels_kept(options, target), config.patch({"triton.cudagraphs": False}):
                found = choose(question(site, target), options, Timer(trial(site), target))
            if found.wins:
                put(site, found.chosen.strategy)
                made += 1
    if made:
        settle(graph)
    return made


def _fits(site: Written) -> bool:
    features = site.query.meta["val"].shape[3]
    return features % 8 == 0 and features <= MOST_FEATURES and prod(site.sizes) <= MOST_SCORES and reads_rows(site)


def put(site: Written, name: str) -> None:
    """Our kernel or one of ``KERNELS`` in the place of an attention."""

    def library(*operands: fx.Node) -> fx.Node:
        kernel, arguments = KERNELS[name]
        whole, scale = added(site)
        whole = None if whole is None else added_to(whole, site.sizes, partial(call, site.last))
        return call(site.last, operator.getitem, call(site.last, kernel, *operands, *arguments(whole), scale=scale), 0)

    fuse(site, partial(short, site) if name == OURS else library)


def _our_us(site: Written, device: Device) -> float | None:
    """Predicted of our kernel, if there is one."""
    found = terms(site)
    query, key, values = (n.meta["val"] for n in (site.query, site.keys, site.values))
    key = key if site.key_rows else key.mT
    if found is None or not takes(query, key, values, len(found[0]), found[1]):
        return None
    return predicted_us(query, key.shape[2], [shape for *_, shape in found[0]], device)


def question(site: Written, target: Target) -> Question:
    """Which kernel runs it."""
    names = list(KERNELS) if site.is_plain else [WITH_BIAS]
    our_us = _our_us(site, target.hardware)

    def decides() -> list[Any]:
        whole, arguments = _whole(site)
        fakes = [n.meta["val"] for n in arguments]
        layouts = [[str(x) for x in (*f.shape, *f.stride(), f.dtype)] for f in fakes]
        return ["written attention", described(whole), layouts]

    def propose() -> list[Candidate]:
        ours = [] if our_us is None else [Candidate(OURS, None, our_us, operator=OURS)]
        libraries = [Candidate(name, None, None, operator=name) for name in names]
        return [*libraries, *ours, Candidate(FALLBACK, None, None)]

    return Question("written attention", 0, target.hardware, decides, propose)


def _whole(site: Written) -> tuple[fx.GraphModule, Sequence[fx.Node]]:
    """The attention by itself, up to the copy of the result that others read, if there is one; and its arguments."""
    end = site.results[0]
    while len(end.users) == 1 and (user := next(iter(end.users))).op == "call_function" and _is_copy(user):
        end = user
    return extract(site.last.graph.owning_module, (end,), site.leaves)  # pyright: ignore[reportArgumentType]


def _is_copy(node: fx.Node) -> bool:
    return str(node.target) in ("aten.transpose.int", "aten.permute.default", "aten.clone.default")


def trial(site: Written) -> Trial:
    """The attention as it is written, and by each kernel, on random tensors like its operands."""
    whole, arguments = _whole(site)

    def make() -> list[Tensor]:
        return [random_tensor(n.meta["val"]) for n in arguments]

    def call(candidate: Candidate, values: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        own = copied(whole)
        if candidate.strategy != FALLBACK:
            (inner,) = [s for s in map(written_at, own.graph.nodes) if s is not None]
            put(inner, candidate.strategy)
            settle(own)
        with timed("inductor"):
            run = fallback.rest(own)
        return lambda: run(values)

    return Trial("written attention", make, call, whole.forward)

"""Attention over few keys with its gradients by our kernels, where they are faster than what a training step has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from tilestream.announce import announced
from tilestream.graph.modules import copied
from tilestream.graph.nodes import results_of
from tilestream.graph.region import extract
from tilestream.graph.settled import settle
from tilestream.graph.short_attention import GRADIENTS, SHORT, short_attention, short_attention_gradients
from tilestream.graph.trained_attention import Trained, put, trained_attentions
from tilestream.graph.written_attention import described
from tilestream.kernels.operators import few_keys_gradients
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import Question, choose
from tilestream.run import fallback, prepare
from tilestream.run.made_up import random_tensor
from tilestream.run.short_attention import NAME, sizes, takes
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timer import Timer, Trial

MEANINGS: dict[Any, Callable[..., Any]] = {SHORT: short_attention, GRADIENTS: short_attention_gradients}


def fuse_trained(joint: fx.GraphModule, results: int, options: Options, target: Target) -> int:
    """Put our kernels in the place of every attention of a training step where they win; how many were.

    An exception of ours costs the attention, and is announced.

    Args:
        joint: functional ATen, with fake tensors of every node in its meta; changed in place.
        results: how many of its outputs are the forward graph's.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    if not options.attention or not prepare.measures(options, target):
        return 0
    made, replaced = 0, set[fx.Node]()
    for site in trained_attentions(joint, _forward(joint, results)):
        with announced("an attention of a training step goes to Inductor", options.fallback):
            each = sequences_each(site)
            if each is None or replaced & {*site.leaves}:
                continue
            with prepare.kernels_kept(options, target):
                found = choose(question(site, target), options, Timer(trial(site, each), target))
            if found.wins:
                replaced |= {*site.results}
                put(site, each)
                made += 1
    if made:
        settle(joint)
    return made


def _forward(joint: fx.GraphModule, results: int) -> list[fx.Node]:
    return [n for n in results_of(joint.graph)[:results] if isinstance(n, fx.Node)]


def sequences_each(site: Trained) -> int | None:
    """How many sequences a CTA of our kernel takes; None: there is no kernel for it."""
    query, key, values, given = (n.meta["val"] for n in (*site.read, site.gradient))
    key = key if site.key_rows else key.mT
    alike = {t.dtype for t in (key, values, given)} == {query.dtype} and takes(
        query, key, values, len(site.added), site.scale
    )
    if not alike or any(t.stride(3) != 1 for t in (query, key, values)):
        return None
    a = sizes(query, key.shape[2], max([1, *(shape[0] for shape in site.added)]), len(site.added))
    return few_keys_gradients.each(a) if few_keys_gradients.takes(a, site.bias is not None) else None


def question(site: Trained, target: Target) -> Question:
    """Which kernels run it."""

    def decides() -> list[Any]:
        whole, arguments = _whole(site)
        fakes = [n.meta["val"] for n in arguments]
        layouts = [[str(x) for x in (*f.shape, *f.stride(), f.dtype)] for f in fakes]
        return ["trained attention", described(whole), layouts]

    def propose() -> list[Candidate]:
        return [Candidate(NAME, None, None, operator=NAME), Candidate(FALLBACK, None, None)]

    return Question("attention of a training step", 0, target.hardware, decides, propose)


def _whole(site: Trained) -> tuple[fx.GraphModule, Sequence[fx.Node]]:
    """The attention with its gradients by itself, and its arguments."""
    return extract(site.gradient.graph.owning_module, site.results, site.leaves)  # pyright: ignore[reportArgumentType]


def trial(site: Trained, each: int) -> Trial:
    """The attention with its gradients as the graph has them, and by our kernels, on random tensors like its operands;
    held to what ours mean."""
    whole, arguments = _whole(site)
    results = len(site.results) - len(site.ends) - (site.bias is not None)

    def ours() -> fx.GraphModule:
        own = copied(whole)
        (inner,) = trained_attentions(own, _forward(own, results))
        put(inner, each)
        settle(own)
        return own

    def make() -> list[Tensor]:
        return [random_tensor(n.meta["val"]) for n in arguments]

    def call(candidate: Candidate, values: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        own = copied(whole) if candidate.strategy == FALLBACK else ours()
        with timed("inductor"):
            run = fallback.rest(own)
        return lambda: run(values)

    def plain(*values: Tensor) -> Sequence[Tensor]:
        meaning = ours()
        for node in meaning.graph.nodes:
            node.target = MEANINGS.get(node.target, node.target)
        meaning.recompile()
        return meaning(*values)

    return Trial("attention of a training step", make, call, plain)

"""Interactions as kernels of ours: which are, by measurement where there is a GPU, and what runs them there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from tilestream.announce import announced
from tilestream.graph.interaction import INTERACTION, INTERACTION_BACKWARD, Interaction, find_interactions, place
from tilestream.graph.own import on_gpu
from tilestream.options import Options
from tilestream.plan.candidates import Plan
from tilestream.plan.interaction import Kind, kind_of, question
from tilestream.run import prepare
from tilestream.run.target import Target
from tilestream.run.time_interaction import interaction_trial


def stream_interactions(owner: fx.GraphModule, joint: bool, options: Options, target: Target) -> list[Plan]:
    """Put our operators in the place of a graph's interactions that win by them; the choices for these.

    An exception of ours costs the interaction, and is announced.

    Args:
        owner: an inference graph, or a joint one before it is cut; changed in place.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    if not options.interactions:
        return []
    taken: list[tuple[Interaction, Plan]] = []
    for site in find_interactions(owner.graph, joint):
        with announced("an interaction of lookups goes to Inductor", options.fallback):
            made = choice(kind_of(site), options, target)
            if made.wins:
                taken.append((site, made))
    place(owner, [site for site, _ in taken])
    return [made for _, made in taken]


def choice(kind: Kind, options: Options, target: Target) -> Plan:
    """Ours or the library's, forward or both passes: timed once, predicted where nothing is timed."""
    asked = question(kind, target.hardware, target.kind == "reference")
    return prepare.chosen(asked, lambda: interaction_trial(kind, target), options, target)


# -- the kernels


def _interaction(*operands: Any) -> Tensor:
    from tilestream.cuda.interaction import forward

    return forward(*operands)


def _interaction_backward(*operands: Any) -> Tensor:
    from tilestream.cuda.interaction import backward

    return backward(*operands)


on_gpu(INTERACTION, _interaction)
on_gpu(INTERACTION_BACKWARD, _interaction_backward)

"""Operators of a graph by another way where that wins: timed on a GPU, predicted where nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tilestream.announce import announced, said_later
from tilestream.options import Options
from tilestream.plan.candidates import Plan
from tilestream.plan.depthwise import DEPTHWISE_CONVOLUTIONS
from tilestream.plan.interaction import INTERACTIONS, JOINT_INTERACTIONS
from tilestream.plan.patches import PATCHES
from tilestream.plan.replacement import Replacement
from tilestream.plan.replacements import REPLACEMENTS
from tilestream.plan.squeeze import GATES
from tilestream.run import prepare
from tilestream.run.target import Target
from tilestream.run.timer import Trial
from tilestream.run.trials import depthwise_trial, gate_trial, interaction_trial, patches_trial

TRIALS: dict[Replacement, Callable[[Any, Target], Trial]] = {
    INTERACTIONS: interaction_trial,
    JOINT_INTERACTIONS: interaction_trial,
    PATCHES: patches_trial,
    DEPTHWISE_CONVOLUTIONS: depthwise_trial,
    GATES: gate_trial,
}
"""What times each."""


def replace(owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """Replace all in an inference graph that wins by it; the choices for these.

    An exception of ours costs the site, and is announced.

    Args:
        owner: changed in place.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    return [made for each in REPLACEMENTS for made in replace_by(each, owner, options, target)]


def replace_by(each: Replacement, owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """As ``replace``, by one of them."""
    taken: list[Plan] = []
    found = each.sites(owner.graph, options)
    if prepare.measures(options, target):
        with said_later("kernels are not built ahead"):
            kinds = dict.fromkeys(kind for site in found for kind in each.kinds(site, target.hardware))
            prepare.begin_building([s for kind in kinds for s in each.sources(kind, target.hardware)], options, target)
    for site in found:
        with announced(each.instead, options.fallback):
            made = [choice(each, kind, options, target) for kind in each.kinds(site, target.hardware)]
            if all(plan.wins for plan in made) and each.place(owner, site, target.hardware):
                taken += made
    return taken


def choice(each: Replacement, kind: Any, options: Options, target: Target) -> Plan:
    """Whether a kind is computed so, or as it is: timed once."""
    asked = each.question(kind, target.hardware, target.kind == "reference")
    return prepare.chosen(asked, lambda: TRIALS[each](kind, target), options, target)

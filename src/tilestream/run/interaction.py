"""Interactions as kernels of ours: which are, by measurement where there is a GPU, and what runs them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from tilestream.announce import announce_failure
from tilestream.graph.interaction import Interaction, find_interactions, place
from tilestream.graph.interaction.op import LIBRARY
from tilestream.graph.sizes import hint
from tilestream.options import Options
from tilestream.plan.candidates import Plan
from tilestream.plan.chooser import alternative, choose
from tilestream.plan.interaction import Sizes, library_s, ours_s
from tilestream.run import prepare
from tilestream.run.target import Target
from tilestream.run.time_interaction import interaction_trial
from tilestream.run.timer import Timer


@dataclass(frozen=True)
class Kind:
    """All that decides how long an interaction takes. ``tables``: rows of each vector's table, 0 for rows that are
    there."""

    sizes: Sizes
    tables: tuple[int, ...]
    dtype: str
    training: bool


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
        try:
            made = choice(kind_of(site), options, target)
        except Exception as failure:
            if not options.fallback:
                raise
            announce_failure("an interaction of lookups goes to Inductor", failure)
            continue
        if made.wins:
            taken.append((site, made))
    place(owner, [site for site, _ in taken])
    return [made for _, made in taken]


def choice(kind: Kind, options: Options, target: Target) -> Plan:
    """Ours or the library's, forward or both passes: timed once, predicted where nothing is timed."""

    ours_us, library_us = (1e6 * f(kind.sizes, kind.training, target.hardware) for f in (ours_s, library_s))
    asked = alternative("interaction", kind, target.hardware, (ours_us, library_us), target.kind == "reference")
    timer = None
    if prepare.measures(options, target) and options.strategy == "auto":
        timer = Timer(interaction_trial(kind.sizes, kind.tables, kind.dtype, kind.training, target), target)
    with prepare.kernels_kept(options, target):
        return choose(asked, options, timer)


def kind_of(site: Interaction) -> Kind:
    """What decides how long a site of a graph takes."""
    made = site.picked.meta["val"]
    tables = tuple(0 if v.index is None else hint(v.rows.meta["val"].shape[0]) for v in site.vectors)
    looked_up = sum(n > 0 for n in tables)
    sizes = Sizes(hint(made.shape[0]), len(tables), site.features, hint(made.shape[1]), site.head, looked_up)
    return Kind(sizes, tables, str(made.dtype), site.gradient is not None)


# -- the kernels


def _interaction(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, head: int
) -> Tensor:
    from tilestream.cuda.interaction import forward

    return forward(sources, indices, first, second, head)


def _interaction_backward(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, given: Tensor
) -> Tensor:
    from tilestream.cuda.interaction import backward

    return backward(sources, indices, first, second, given)


LIBRARY.impl("interaction", _interaction, "CUDA")
LIBRARY.impl("interaction_backward", _interaction_backward, "CUDA")

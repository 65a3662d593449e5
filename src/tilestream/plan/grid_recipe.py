"""How a candidate is made whose tiles are dealt over the grid: by one pass, which says all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.passes import merge_common_ops, remove_dead_ops
from tilestream.plan.passes.verified import Pass, verified


@dataclass(frozen=True)
class GridRecipe:
    """One candidate. ``deal``: the pass that divides the work: ``share_tile`` of a split, or ``tile_block``."""

    strategy: str
    detail: str
    deal: Callable[..., Pipeline]

    def passes(self, device: Device, queue_depth: int | None = None) -> tuple[Pass, ...]:
        """What turns a program into this candidate; the last one raises where it is not legal."""
        del queue_depth  # there are no queues
        return remove_dead_ops, merge_common_ops, partial(self.deal, device=device), partial(verified, device=device)

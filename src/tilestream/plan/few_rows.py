"""Candidates for a feed-forward block on few rows: shared tiles, the best of each tail by prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan.passes import merge_common_ops, remove_dead_ops
from tilestream.plan.passes.share_tile import Split, share_tile, splits, tiles_for
from tilestream.schedule.fits import verify_on
from tilestream.schedule.shared_tile import MOST_ROWS, Tail, build, find_block, is_block, written_out
from tilestream.schedule.shared_tile_cost import shared_tile_cost

EACH = 2
"""Splits of one tail that become candidates."""
STRATEGY = "shared"

Pass = Callable[[Pipeline], Pipeline]


@dataclass(frozen=True)
class SharedRecipe:
    """How one candidate is made."""

    split: Split
    strategy: str = STRATEGY

    @property
    def detail(self) -> str:
        return str(self.split)

    def passes(self, device: Device, queue_depth: int | None = None) -> tuple[Pass, ...]:
        """What turns a program into this candidate; the last one raises where it is not legal."""
        del queue_depth  # there are no queues

        def verified(p: Pipeline) -> Pipeline:
            verify_on(p, device)
            return p

        return (remove_dead_ops, merge_common_ops, partial(share_tile, split=self.split, device=device), verified)


def in_any_order(options: Options) -> bool:
    """Whether partial results may be added in any order: where that is asked for, and torch is not asked for
    deterministic algorithms."""
    return options.any_order and not torch.are_deterministic_algorithms_enabled()


def same_bin(a: int, b: int) -> bool:
    """Whether what was chosen at ``a`` rows suits ``b`` rows: the tiles of few rows come in sizes, more are alike."""
    if max(a, b) <= MOST_ROWS:
        return tiles_for(a) == tiles_for(b)
    return min(a, b) > MOST_ROWS


def recipes(program: Pipeline, rows: int, device: Device, options: Options) -> list[SharedRecipe]:
    """The splits of ``program`` at ``rows`` rows predicted best, ``EACH`` of a tail; none if it is no block."""
    if rows > MOST_ROWS or not is_block(program):
        return []
    ranked = sorted(_predicted(program, rows, device, in_any_order(options)), key=lambda found: found[0])
    taken: dict[Tail, int] = {}
    made = []
    for _, split in ranked:
        taken[split.tail] = taken.get(split.tail, 0) + 1
        if taken[split.tail] <= EACH:
            made.append(SharedRecipe(split))
    return made


def _predicted(program: Pipeline, rows: int, device: Device, any_order: bool) -> Iterator[tuple[float, Split]]:
    """Seconds of every split that fits."""
    written = written_out(program)
    for split in splits(find_block(written.stages[0], written), rows, device, any_order):
        try:
            made = share_tile(program, split, device)
            schedule = build(made.stages[0], made, device.shared_bytes_per_cta)
        except VerifyError:
            continue
        yield shared_tile_cost(schedule, rows, device).total_s, split

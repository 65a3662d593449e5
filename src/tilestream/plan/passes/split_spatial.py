"""Stages on different SMs, joined by queues through the L2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Residency, Transport
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.plan.passes.fit import isolated, narrowest, problem
from tilestream.plan.passes.segments import Body, body, cut

SLACK = 1.1  # a stage may take this much longer than its share before another stage is opened


def split_spatial(program: Pipeline, device: Device, layers_per_stage: int = 1) -> Pipeline:
    """Cut between linears into stages of about equal work, at the narrowest places, with L2 queues.

    Equal means the work of the ``layers_per_stage`` heaviest linears: small layers join a neighbour, since a small
    stage by itself is the slowest (its hand-over is not). A stage of one layer's work keeps its weights resident if
    each of its parts could. A tile with several consumers is multicast; one that a later stage takes skips.

    Raises:
        VerifyError: there is nothing to split.
    """
    parts, look = body(program), _looks(program, device)
    pieces = parts.pieces()
    heaviest = sorted((look(piece).seconds for piece in pieces), reverse=True)
    share = sum(heaviest[:layers_per_stage]) * SLACK
    cuts = _cuts(pieces, look, share, layers_per_stage, lambda added: added.work_s)
    if not cuts:  # all layers are small: as far as their waits too would fill a share
        cuts = _cuts(pieces, look, share, layers_per_stage, lambda added: added.seconds)
    if not cuts:
        raise VerifyError(f"{layers_per_stage} layers a stage put the whole region into one stage", "use fewer")
    return cut(parts, cuts, Transport.L2, "spatial")


def _cuts(
    pieces: Sequence[tuple[int, int]],
    look: Callable[[tuple[int, int]], _Look],
    share: float,
    layers_per_stage: int,
    adds: Callable[[_Look], float],
) -> list[int]:
    """Where stages begin, behind the first. A piece joins the stage before it where what it ``adds`` leaves that at its
    ``share``, in seconds a tile."""
    cuts: list[int] = []
    start, stage = pieces[0][0], look(pieces[0])
    used = stage.seconds
    for piece in pieces[1:]:
        next_one = look(piece)
        if used + adds(next_one) <= share:
            joined = look((start, piece[1]))
            keeps = joined.resident or layers_per_stage > 1 or not (stage.resident and next_one.resident)
            if joined.fits and keeps:
                stage, used = joined, used + adds(next_one)
                continue
        cuts.append(piece[0])
        start, stage, used = piece[0], next_one, next_one.seconds
    return cuts


@dataclass(frozen=True)
class _Look:
    """What a stage of some ops would be like: whether it fits, with weights resident too, and seconds a tile.

    ``work_s`` is without waits for inputs, of which it has none behind ops of the same stage.
    """

    fits: bool
    resident: bool
    seconds: float
    work_s: float


@lru_cache(maxsize=8)
def _looks(program: Pipeline, device: Device) -> Callable[[tuple[int, int]], _Look]:
    """What a stage of some of a program's ops would be like: every candidate asks for the same ones."""
    return cache(partial(_look, body(program), device))


def _look(parts: Body, device: Device, piece: tuple[int, int]) -> _Look:
    inner = [b for b in piece if 0 < b < len(parts.ops)]
    pipeline = cut(parts, inner, Transport.DRAM, "spatial")
    alone = isolated(pipeline)["s1" if piece[0] else "s0"]
    placement, reason = narrowest(alone, device)
    resident = not problem(alone, device, placement, Residency.RESIDENT)
    if reason:
        return _Look(False, False, 0.0, 0.0)
    stage = alone.stages[0].with_(placement=placement, residency=Residency.RESIDENT)
    cost = stage_cost(stage, alone, device)
    without = cost.step_s - cost.step["inputs"].seconds
    return _Look(True, resident, cost.step_s / stage.tiles_per_step, without / stage.tiles_per_step)

"""Stages on different SMs, joined by queues through the L2."""

from __future__ import annotations

from dataclasses import replace

from tilestream.cost import stage_cost
from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir import Pipeline, Residency, Transport
from tilestream.passes.fit import isolated, narrowest, problem
from tilestream.passes.segments import Body, body, cut

SLACK = 1.1  # a stage may take this much longer than its share before another stage is opened


def split_spatial(program: Pipeline, device: Device, layers_per_stage: int = 1) -> Pipeline:
    """Cut between linears into stages of about equal work, at the narrowest places, with L2 queues.

    Equal means the work of the ``layers_per_stage`` heaviest linears: small layers join a neighbour, since a small
    stage by itself is the slowest (its hand-over is not). A stage of one layer's work keeps its weights resident if
    each of its parts could. A tile with several consumers is multicast; one that a later stage takes skips.

    Raises:
        VerifyError: there is nothing to split.
    """
    parts = body(program)
    bounds = [0, *parts.narrowest_cuts(), len(parts.ops)]
    pieces = list(zip(bounds, bounds[1:], strict=False))
    if len(pieces) < 2:
        raise VerifyError(
            "the region has fewer than two linears: nothing to split over stages", "use strategy='vertical'"
        )
    looks = {piece: _look(parts, piece, device) for piece in pieces}
    heaviest = sorted((look.seconds for look in looks.values()), reverse=True)
    share = sum(heaviest[:layers_per_stage]) * SLACK
    cuts: list[int] = []
    start, used = pieces[0][0], looks[pieces[0]].seconds
    for piece in pieces[1:]:
        joined = _look(parts, (start, piece[1]), device)
        apart = _look(parts, (start, piece[0]), device)
        keeps = joined.resident or layers_per_stage > 1 or not (apart.resident and looks[piece].resident)
        if used + looks[piece].seconds <= share and joined.fits and keeps:
            used += looks[piece].seconds
        else:
            cuts.append(piece[0])
            start, used = piece[0], looks[piece].seconds
    if not cuts:
        raise VerifyError(f"{layers_per_stage} layers a stage put the whole region into one stage", "use fewer")
    return cut(parts, cuts, Transport.L2, "spatial")


class _Look:
    """What a stage of some ops would be like: whether it fits, with weights resident, and seconds a tile."""

    def __init__(self, fits: bool, resident: bool, seconds: float) -> None:
        self.fits = fits
        self.resident = resident
        self.seconds = seconds


def _look(parts: Body, piece: tuple[int, int], device: Device) -> _Look:
    inner = [b for b in piece if 0 < b < len(parts.ops)]
    pipeline = cut(parts, inner, Transport.DRAM, "spatial")
    stage, reason = narrowest(pipeline.stages[1 if piece[0] else 0], pipeline, device)
    alone = isolated(stage.name, pipeline)
    resident = replace(stage, residency=Residency.RESIDENT)
    cost = stage_cost(replace(alone.stages[0], placement=stage.placement, residency=Residency.RESIDENT), alone, device)
    return _Look(not reason, not problem(resident, alone, device), cost.step_s / cost.tiles_per_step)

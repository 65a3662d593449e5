"""How one stage runs on one CTA: its ops cut into steps, each product with what follows it in registers."""

from __future__ import annotations

from functools import lru_cache

from tilestream.ir.columns import first_column
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.stream.blocks import START
from tilestream.kernels.stream.model import Gemm, Place, Places, Schedule, Segment, Sink, Step
from tilestream.kernels.stream.node_sums import check_sums
from tilestream.kernels.stream.phases import cut_phases
from tilestream.kernels.stream.places import assign_places
from tilestream.kernels.stream.walk import Draft, Walk


@lru_cache(maxsize=4096)
def build(stage: Stage, pipeline: Pipeline) -> Schedule:
    """Order a stage's ops into steps and give every tile a place.

    Raises:
        VerifyError: if a tile is wider than the placement allows or products have different dtypes; the message names
            the user's line.
    """
    walk = Walk(stage, pipeline).run()
    places = assign_places(walk)
    steps = _steps(walk, places)
    if walk.loops:  # whose operands crowd the registers out: what waits in shared memory takes as little as it can
        places = assign_places(walk, _overwritten(steps, walk, places))
    made = Schedule(
        **vars(places), stage=walk.stage, dtype=walk.dtype, pass_columns=walk.pass_columns, steps=steps,
        tiles=walk.tiles, streams=walk.streams, views=walk.views, loops=walk.loops,
    )  # fmt: skip
    check_sums(made)
    return made


def _steps(walk: Walk, places: Places) -> tuple[Step, ...]:
    steps = []
    made: dict[int, list[Sink]] = {}
    for tile, place in places.places.items():
        if tile in places.homes and tile not in walk.cats and tile not in walk.packed:
            made.setdefault(walk.step_of[tile], []).append(Sink(tile, place.value, tile))
    for k, draft in enumerate(walk.drafts):
        gemm = _gemm(walk, draft, places) if draft.linear is not None else None
        held = draft.linear.out.name if draft.linear is not None and draft.linear.out is not None else ""
        phases = cut_phases(held, draft, [*draft.sinks, *made.get(k, [])], walk)
        first = draft.linear or (draft.nodes[0] if draft.nodes else None)
        source = first.source if first is not None else ""
        steps.append(Step(k, draft.features, gemm, held, phases, source))
    return tuple(steps)


def _overwritten(steps: tuple[Step, ...], walk: Walk, places: Places) -> set[tuple[str, str]]:
    """(old, new): whole tiles in shared memory of which a step reads the one for the last time where it writes the
    other. Each lane reads its own elements before it writes them, so both can have one place: a residual stream."""
    whole = {t for t in places.buffers if t not in walk.cats and t not in walk.shared}
    pairs = set()
    for step in steps:
        for p, phase in enumerate(step.phases):
            now = {i for n in phase.nodes for i in n.ins}
            later = {i for other in step.phases[p + 1 :] for n in other.nodes for i in n.ins}
            for sink in phase.sinks:
                if sink.kind == "shared" and sink.target == sink.tile and sink.tile in whole:
                    pairs |= {(old, sink.tile) for old in (now - later) & whole}
    return pairs


def _gemm(walk: Walk, draft: Draft, places: Places) -> Gemm:
    linear = draft.linear
    assert linear is not None
    segments, column = [], 0
    for part in linear.ins:
        base, start = walk.views.get(part, (part, 0))
        place = Place.STREAM if part in walk.streams else places.places[base]
        name = part if part in walk.streams else base
        segments.append(Segment(name, place, walk.features[part], column, start))
        column += walk.features[part]
    weight = linear.params[0]
    bias = linear.params[1] if len(linear.params) > 1 else ""
    order = {Place.STREAM: 0, Place.SHARED: 1, Place.REGISTERS: 2}
    first = int(linear.attr(START, 0) or 0)
    parts = tuple(sorted(segments, key=lambda s: order[s.place]))
    return Gemm(weight, bias, linear.made.features, parts, first, first_column(linear))

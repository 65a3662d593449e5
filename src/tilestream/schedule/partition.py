"""A stage's ops cut into steps: each product with the operations that follow it in registers."""

from __future__ import annotations

from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.schedule.model import Gemm, Place, Schedule, Segment, Step
from tilestream.schedule.phases import Scope, cut_phases
from tilestream.schedule.places import Places, assign_places
from tilestream.schedule.walk import Draft, Walk


def partition(stage: Stage, pipeline: Pipeline) -> Schedule:
    """Cut ``stage`` into steps and place its tiles.

    Raises:
        VerifyError: a tile is too wide, or products have different dtypes.
    """
    walk = Walk(stage, pipeline).run()
    places = assign_places(walk)
    steps = []
    scope = Scope(walk.streams, walk.rows, walk.floating, walk.step_of, walk.views, walk.features)
    for k, draft in enumerate(walk.drafts):
        gemm = _gemm(walk, draft, places) if draft.linear is not None else None
        held = draft.linear.out.name if draft.linear is not None and draft.linear.out is not None else ""
        sinks = [*draft.sinks, *places.sinks.get(k, [])]
        phases = cut_phases(k, held, draft.features, draft.nodes, sinks, scope)
        first = draft.linear or (draft.nodes[0] if draft.nodes else None)
        source = first.source if first is not None else ""
        steps.append(Step(k, draft.features, gemm, held, phases, source))
    return Schedule(
        walk.stage, walk.dtype, walk.pass_columns, tuple(steps), walk.tiles, places.place, walk.streams, walk.views,
        places.slots, places.slot_features, places.buffers, places.buffer_features, places.buffer_dtypes,
        places.registers,
    )  # fmt: skip


def _gemm(walk: Walk, draft: Draft, places: Places) -> Gemm:
    linear = draft.linear
    assert linear is not None and linear.out is not None
    segments, column = [], 0
    for part in linear.ins:
        base, start = walk.views.get(part, (part, 0))
        place = Place.STREAM if part in walk.streams else places.place[base]
        name = part if part in walk.streams else base
        segments.append(Segment(name, place, walk.features[part], column, start))
        column += walk.features[part]
    weight = linear.params[0]
    bias = linear.params[1] if len(linear.params) > 1 else ""
    order = {Place.STREAM: 0, Place.SHARED: 1, Place.REGISTERS: 2}
    return Gemm(weight, bias, linear.out.features, tuple(sorted(segments, key=lambda s: order[s.place])))

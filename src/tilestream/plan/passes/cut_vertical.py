"""The whole chain in one stage; where it does not fit, as few and as narrow cuts as possible."""

from __future__ import annotations

from collections.abc import Callable

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Transport
from tilestream.plan.passes.fit import isolated_stage, narrowest
from tilestream.plan.passes.segments import Body, body, cut

Form = Callable[[Pipeline], Pipeline]
"""How the stages that are cut run: what is asked for a place on an SM, and handed on."""


def as_it_is(p: Pipeline) -> Pipeline:
    return p


def cut_vertical(program: Pipeline, device: Device, form: Form = as_it_is) -> Pipeline:
    """One stage, or several launches joined by DRAM queues: the cuts that the fewest bytes cross.

    Cuts lie between linears; if that is not enough (the products of a stage have one dtype), beside casts too.
    Among cuts with equal traffic the fewest launches win.

    Raises:
        VerifyError: some linear with its neighbours fits no SM by itself; the message says why.
    """
    parts = body(program)
    reason = _reason(parts, 0, len(parts.ops), device, form)
    if not reason:
        return form(cut(parts, [], Transport.DRAM, "vertical"))
    found = _cheapest(parts, parts.narrowest_cuts(), device, form)
    if found is None:
        parts = body(program, cheap=("load",))
        beside_casts = {c for i, op in enumerate(parts.ops) if op.kind == "cast" for c in (i, i + 1)}
        inner = {c for c in beside_casts if 0 < c < len(parts.ops)}
        if inner:
            found = _cheapest(parts, sorted(inner | set(parts.narrowest_cuts())), device, form)
    if found is None:
        raise VerifyError(f"no cut into launches fits: {reason}", "leave the region to Inductor")
    return form(cut(parts, found, Transport.DRAM, "vertical"))


def _cheapest(parts: Body, positions: list[int], device: Device, form: Form) -> list[int] | None:
    """The subset of ``positions`` to cut at, by dynamic programming over the last cut; None if nothing fits."""
    bounds = [0, *positions, len(parts.ops)]
    best: list[tuple[int, int, list[int]] | None] = [(0, 0, [])] + [None] * (len(bounds) - 1)
    for stop in range(1, len(bounds)):
        for start in range(stop - 1, -1, -1):
            if _reason(parts, bounds[start], bounds[stop], device, form):
                break  # a longer piece needs no less
            before = best[start]
            if before is None:
                continue
            crossed = parts.width_of(bounds[start]) if start else 0
            cuts = [*before[2], bounds[start]] if start else []
            option = (before[0] + crossed, before[1] + 1, cuts)
            current = best[stop]
            if current is None or option[:2] < current[:2]:
                best[stop] = option
    last = best[-1]
    return None if last is None else last[2]


def _reason(parts: Body, start: int, stop: int, device: Device, form: Form) -> str:
    """Why the ops from ``start`` to ``stop`` do not fit one stage; empty if they do."""
    inner = [b for b in (start, stop) if 0 < b < len(parts.ops)]
    pipeline = form(cut(parts, inner, Transport.DRAM, "vertical"))
    return narrowest(isolated_stage(pipeline, "s1" if start else "s0"), device)[1]

"""The whole chain in one stage; where it does not fit, as few and as narrow cuts as possible."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir import Pipeline, Transport
from tilestream.passes.fit import narrowest
from tilestream.passes.segments import Body, body, cut


def cut_vertical(program: Pipeline, device: Device) -> Pipeline:
    """One stage, or several launches joined by DRAM queues: the cuts that the fewest bytes cross.

    Among cuts with equal traffic the fewest launches win.

    Raises:
        VerifyError: some linear with its neighbours fits no SM by itself; the message says why.
    """
    parts = body(program)
    bounds = [0, *parts.narrowest_cuts(), len(parts.ops)]
    best: list[tuple[int, int, list[int]] | None] = [(0, 0, [])] + [None] * (len(bounds) - 1)
    reasons: list[str] = []
    whole = _reason(parts, 0, len(parts.ops), device)
    if not whole:
        return cut(parts, [], Transport.DRAM, "vertical")
    for stop in range(1, len(bounds)):
        # Longer pieces only need more room: the first that fails ends the row.
        for start in range(stop - 1, -1, -1):
            reason = _reason(parts, bounds[start], bounds[stop], device)
            if reason:
                reasons.append(reason)
                break
            before = best[start]
            if before is None:
                continue
            crossed = before[0] + (parts.width_of(bounds[start]) if start else 0)
            option = (crossed, before[1] + 1, [*before[2], bounds[start]] if start else [])
            if best[stop] is None or option[:2] < best[stop][:2]:  # pyright: ignore[reportOptionalSubscript]
                best[stop] = option
    found = best[-1]
    if found is None:
        raise VerifyError(
            f"no cut into launches fits: {reasons[0] if reasons else whole}", "leave the region to Inductor"
        )
    return cut(parts, found[2], Transport.DRAM, "vertical")


def _reason(parts: Body, start: int, stop: int, device: Device) -> str:
    """Why the ops from ``start`` to ``stop`` do not fit one stage; empty if they do."""
    inner = [b for b in (start, stop) if 0 < b < len(parts.ops)]
    pipeline = cut(parts, inner, Transport.DRAM, "vertical")
    stage = pipeline.stages[1 if start else 0]
    return narrowest(stage, pipeline, device)[1]

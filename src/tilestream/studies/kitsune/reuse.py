"""What the L2 keeps from one launch to the next: reads that DRAM does not serve.

Table 2 and the speedups beside the paper's leave this out (``traffic``). With it, every execution is credited for
values that were moved a short while ago: least recently used, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilestream.devices import Device
from tilestream.plan.spatial.operators import OperatorGraph
from tilestream.plan.spatial.traffic import reads, writes
from tilestream.simulator.workload import SimLaunch

KEPT = 0.5
"""Of the L2, for values of earlier launches: the rest holds what streams past."""


def cached_shares(graph: OperatorGraph, units: Sequence[Sequence[str]], device: Device) -> list[float]:
    """For each launch, in order, the share of the bytes it reads that the L2 still holds: 0 to 1."""
    moved = 0.0
    last: dict[str, float] = {}
    shares = []
    for ops in units:
        read = reads(graph, ops)
        room = KEPT * device.l2_bytes
        touched = {**read, **writes(graph, ops)}
        own = sum(touched.values())  # the last byte of an operand is read after the launch has moved all before it
        hits = sum(b for v, b in read.items() if v in last and moved - last[v] + own <= room)
        shares.append(hits / sum(read.values()) if hits else 0.0)
        moved += own
        last |= dict.fromkeys(touched, moved)
    return shares


def with_cached(launch: SimLaunch, share: float) -> SimLaunch:
    """``launch`` with ``share`` of its DRAM reads served by the L2."""
    if not share:
        return launch
    stages = tuple(
        replace(
            s,
            work=replace(s.work, dram_read=s.work.dram_read * (1 - share)),
            once=replace(s.once, dram_read=s.once.dram_read * (1 - share)),
        )
        for s in launch.stages
    )
    return replace(launch, stages=stages)

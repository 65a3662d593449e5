"""How long a kernel of segments takes: rows through the L2, what comes from DRAM, instructions of the edges."""

from __future__ import annotations

from math import ceil, prod

from tilestream.devices import Device
from tilestream.ir.pipeline import ELEMENT_BYTES
from tilestream.ir.tileops import OPS
from tilestream.kernels.costs import Amount, Counts, beside
from tilestream.kernels.segments.layout import LANE_BYTES, WARP, Layout, count
from tilestream.kernels.segments.model import Pass, Place, Program, Read, Step

SECTOR = 32
"""Bytes that the L2 and DRAM move at least."""
GATHERED = 1.35
"""Of the L2's rate for queues, what rows at random places come at: 1,000,000 of 128 and 256 bytes, 23.4 and 42.1 us."""
OVERHEAD = 14.0
"""Instructions of a lane for each row of an edge besides its elements: place, bounds, predicates."""
ISSUE = 1.8
"""Of an edge's instructions, times what they need: teams of a warp wait for the longest of their nodes, and the last
batch of a node's edges is not full. Fitted with the two above to ten kernels on a uniform graph (docs/kernels.md);
where edges follow a power law kernels take 1.05 to 1.65 times as long."""


def cost(p: Program, at: Layout, nodes: int, edges: int, device: Device) -> Counts:
    """A launch on so many nodes and edges. Tables are taken to have as many rows as there are nodes; of tensors of
    edges each row is read once, in whatever order."""
    tables = {r.number: _row(r) * nodes for r in p.reads.values() if r.place is not Place.FIXED and _is_table(p, r)}
    once = sum(tables.values())
    rows = [r for each in p.passes for r in _edge_rows(p, each)]
    again = sum(_moved(r) for r in rows) * edges
    looked_up = sum(_moved(r) for r in rows if _is_table(p, r)) * edges
    streamed = sum(_row(r) for r in p.reads.values() if r.place is Place.EDGE and not _is_table(p, r)) * edges
    indices = 4 * edges * len({r.index for r in p.reads.values() if r.index >= 0})
    own = sum(_row(r) for r in p.reads.values() if r.place is Place.NODE and r.number not in tables) * nodes
    written = sum(_row(s.write) * (edges if s.place is Place.EDGE else nodes) for s in p.stores if s.write)
    missed = max(0.0, 1.0 - device.l2_bytes / once) * (looked_up - once) if once else 0.0
    dram = min(once, looked_up) + max(0.0, missed) + streamed + indices + own + written + 4 * nodes
    l2 = again + indices * len(p.passes) + own + written
    lanes = sum(_instructions(p, at, each) for each in p.passes) * edges * at.team
    memory = Counts(
        "memory",
        (Amount("dram", dram, device.dram_bytes_per_s), Amount("l2", l2, device.l2_bytes_per_s * GATHERED)),
        beside,
    )
    issued = Amount("lanes", lanes, device.simt_flops / ISSUE)
    further = max(0, len(p.passes) - 1) if p.busy >= 0 else 0  # launches, for busy nodes
    launch = Amount("launch", (1 + further) * device.launch_s + device.ramp_s)
    return Counts("segments", (Counts("streams", (memory, issued), beside), launch))


def _is_table(p: Program, r: Read) -> bool:
    """Whether a read is of rows that several edges may name."""
    return r.index >= 0 and r.tensor.axes[0].name != p.edges


def _row(r: Read) -> int:
    """Bytes of a row, or of the columns of it that are read."""
    return ELEMENT_BYTES[r.tensor.dtype] * prod(
        a.size or 1 for a in r.tensor.axes[len(r.tensor.axes) - len(r.columns) :]
    )


def _moved(r: Read) -> int:
    return ceil(_row(r) / SECTOR) * SECTOR if r.index >= 0 else _row(r)


def _edge_rows(p: Program, each: Pass) -> list[Read]:
    return [p.reads[name] for name in each.reads]


def _instructions(p: Program, at: Layout, each: Pass) -> float:
    """Of one lane for one edge."""
    total = 0.0
    for name in each.reads:
        n = count(p, at, p.reads[name].axes)
        total += n + OVERHEAD + n * ELEMENT_BYTES[p.reads[name].tensor.dtype] / LANE_BYTES
    total += sum(_of_step(p, at, s) for s in (*each.steps, *each.sums))
    return total


def _of_step(p: Program, at: Layout, s: Step) -> float:
    n = count(p, at, s.taken)
    if s.op.kind != "product":
        return n * max(1.0, OPS[s.op.kind].flops)
    shuffles = 2 * (min(at.lanes, WARP) - 1).bit_length() * count(p, at, s.axes) if s.taken != s.axes else 0
    return n * len(s.operands) + shuffles + (8 if s.op.combine == "softmax" else 0)

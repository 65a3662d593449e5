"""How long a kernel of segments takes: rows through the L2, what comes from DRAM, instructions of the edges."""

from __future__ import annotations

from math import gcd, prod

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
BURST = 64
"""Bytes that DRAM gives at least."""
SCATTERED = 0.5
"""Of DRAM's rate, what rows at random places come at. Fitted, with ``WAITED`` of the simulator, to the forty kernels of
``benchmarks/lib/fresh_ragged.py``'s validation set."""
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
    own_edges = [r for r in p.reads.values() if r.place is Place.EDGE and not _is_table(p, r)]
    beyond = {r: _beyond(_row(r) * edges, device) if r.index >= 0 else 0.0 for r in own_edges}
    streamed = sum(_row(r) * (1.0 - share) for r, share in beyond.items()) * edges
    indices = 4 * edges * len({r.index for r in p.reads.values() if r.index >= 0})
    own = sum(_row(r) for r in p.reads.values() if r.place is Place.NODE and r.number not in tables) * nodes
    written = sum(_row(s.write) * (edges if s.place is Place.EDGE else nodes) for s in p.stores if s.write)
    missed = _beyond(once, device) * (looked_up - once)
    scattered = max(0.0, missed) + sum(_moved(r, BURST) * share for r, share in beyond.items()) * edges
    dram = min(once, looked_up) + streamed + indices + own + written + 4 * nodes
    l2 = again + indices * len(p.passes) + own + written
    lanes = sum(_instructions(p, at, each) for each in p.passes) * edges * at.team
    special = sum(_special(p, at, each) for each in p.passes) * edges * at.team
    in_rows = Amount("rows in order", dram, device.dram_bytes_per_s)
    anywhere = Amount("rows at random", scattered, device.dram_bytes_per_s * SCATTERED)
    memory = Counts(
        "memory",
        (Counts("dram", (in_rows, anywhere)), Amount("l2", l2, device.l2_bytes_per_s * GATHERED)),
        beside,
    )
    issued = Counts(
        "issued",
        (
            Amount("lanes", lanes, device.simt_flops / ISSUE),
            Amount("special", special, device.sfu_ops_per_s / ISSUE),
        ),
        beside,
    )
    further = max(0, len(p.passes) - 1) if p.busy >= 0 else 0  # launches, for busy nodes
    launch = Amount("launch", (1 + further) * device.launch_s + device.ramp_s)
    return Counts("segments", (Counts("streams", (memory, issued), beside), launch))


def _beyond(size: float, device: Device) -> float:
    """The share of so many bytes that the L2 does not hold."""
    return max(0.0, 1.0 - device.l2_bytes / size) if size else 0.0


def _is_table(p: Program, r: Read) -> bool:
    """Whether a read is of rows that several edges may name."""
    return r.index >= 0 and r.tensor.axes[0].name != p.edges


def _row(r: Read) -> int:
    """Bytes of a row, or of the columns of it that are read."""
    return ELEMENT_BYTES[r.tensor.dtype] * prod(
        a.size or 1 for a in r.tensor.axes[len(r.tensor.axes) - len(r.columns) :]
    )


def _moved(r: Read, grain: int = SECTOR) -> int:
    """Bytes of a row at a random place, in whole grains of memory: the mean over where rows begin in one."""
    row = _row(r)
    return row + grain - gcd(row, grain) if r.index >= 0 else row


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


def _special(p: Program, at: Layout, each: Pass) -> float:
    """Of one lane for one edge, those of the special function unit; of a softmax an exponential of each score."""
    total = sum(count(p, at, s.taken) * OPS[s.op.kind].transcendental for s in each.steps if s.op.kind != "product")
    return total + sum(count(p, at, p.axes(s.operands[0])) for s in each.sums if s.op.combine == "softmax")


def _of_step(p: Program, at: Layout, s: Step) -> float:
    n = count(p, at, s.taken)
    if s.op.kind != "product":
        return n * max(1.0, OPS[s.op.kind].flops)
    shuffles = 2 * (min(at.lanes, WARP) - 1).bit_length() * count(p, at, s.axes) if s.taken != s.axes else 0
    return n * len(s.operands) + shuffles + (8 if s.op.combine == "softmax" else 0)

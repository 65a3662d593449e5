"""How long a kernel of segments takes: rows through the L2 and from DRAM, instructions of warps, and their waits."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, prod

from tilestream.devices import Device
from tilestream.ir.lengths import Lengths
from tilestream.ir.pipeline import ELEMENT_BYTES
from tilestream.ir.tileops import OPS
from tilestream.kernels.coefficients.segments import H200_SEGMENTS as FITTED
from tilestream.kernels.costs import Amount, Counts, beside
from tilestream.kernels.segments.layout import LANE_BYTES, LONG, THREADS, WARP, Layout, piece_edges
from tilestream.kernels.segments.model import Pass, Place, Program, Read, Step

SECTOR = 32
"""Bytes that the L2 and DRAM move at least."""
BURST = 64
"""Bytes that DRAM gives at least."""
WARPS = THREADS // WARP
VISIT, BATCH, EDGE, INDEX, LOAD, SCORE, SHUFFLE = 80.0, 6.0, 5.5, 3.0, 2.8, 11.0, 4.0
"""Instructions of a warp for a node, a batch of its edges, an edge, and of an edge for an index, a load, a score of a
softmax and a step of a sum over lanes. Counted in the machine code of the eighty kernels of the first two sets of
``benchmarks.lib.fresh_ragged``, whose loops come out 6 % off."""


@dataclass(frozen=True)
class Walk:
    """How warps go along edges: what they do once a node, and once a batch of edges that are under way at once.

    Teams of a warp wait for the longest of their nodes, and so do CTAs before the next one takes their place.

    Attributes:
        visits: of nodes by warps, those of pieces of busy nodes included.
        edges: of warps, of the longest of their teams' nodes; ``batches`` of these, in each pass.
        chains: of CTAs: batches that one makes after another, in each pass; ``ctas``: how many there are.
        longest: of the chains, in each pass.
    """

    visits: float
    edges: float
    batches: tuple[float, ...]
    ctas: float
    chains: tuple[float, ...]
    longest: tuple[int, ...]


def walk(at: Layout, lengths: Lengths) -> Walk:
    """Of nodes in no order. Busy nodes come in pieces, of which each is a CTA's."""
    short, pieces = dealt(at.p, lengths)
    together, teams = max(1, WARP // at.team), max(1, THREADS // at.team)
    visits = ceil(short.outer / together) + WARPS * pieces.outer
    edges = short.steps_together(at.at_once, together) + WARPS * pieces.steps(THREADS // at.lanes)
    batches, chains, longest = list[float](), list[float](), list[int]()
    for each in at.p.passes:
        batch = at.in_flight(each) * at.at_once
        of_pieces = pieces.steps(batch * (THREADS // at.team))
        batches.append(short.steps_together(batch, together) + WARPS * of_pieces)
        chains.append(short.steps_together(batch, teams) + of_pieces)
        longest.append(max(ceil(short.largest / batch), ceil(pieces.largest / (batch * (THREADS // at.team)))))
    ctas = ceil(short.outer / teams) + pieces.outer
    return Walk(visits, edges, tuple(batches), ctas, tuple(chains), tuple(longest))


def dealt(p: Program, lengths: Lengths) -> tuple[Lengths, Lengths]:
    """Edges of all nodes that a team goes along, none of busy ones, and of pieces of those."""
    if p.busy < 0:
        return lengths, Lengths(())
    short = [(n, many) for n, many in lengths.counts if n <= LONG]
    busy = [(n, many) for n, many in lengths.counts if n > LONG]
    piece = piece_edges(lengths.total)
    pieces = dict[int, int]()
    for n, many in busy:
        for size, of in ((piece, n // piece), (n % piece, 1)):
            pieces[size] = pieces.get(size, 0) + of * many
    none = dict(short).get(0, 0) + sum(many for _, many in busy)
    left = tuple(sorted(({**dict(short), 0: none} if none else dict(short)).items()))
    each = tuple(0 if n > LONG else n for n in lengths.each)
    return Lengths(left, each=each), Lengths(tuple(sorted((n, many) for n, many in pieces.items() if n and many)))


def cost(at: Layout, nodes: int, edges: int, device: Device, lengths: Lengths | None = None) -> Counts:
    """A launch on so many nodes and edges, of these ``lengths`` or of a random graph's. Tables are taken to have as
    many rows as there are nodes; of tensors of edges each row is read once, in whatever order."""
    p, moved = at.p, traffic(at.p, nodes, edges, device)
    gone = walk(at, lengths or Lengths.at_random(nodes, edges))
    lanes = gone.visits * VISIT + sum(gone.batches) * BATCH + gone.edges * sum(_of_edge(at, s) for s in p.passes)
    special = gone.edges * sum(_special(at, each) for each in p.passes)
    in_rows = Amount("rows in order", moved.in_order, device.dram_bytes_per_s)
    anywhere = Amount("rows at random", moved.scattered, device.dram_bytes_per_s)
    memory = Counts(
        "memory",
        (Counts("dram", (in_rows, anywhere)), Amount("l2", moved.l2, device.l2_bytes_per_s * FITTED.gathered)),
        beside,
    )
    issued = Counts(
        "issued",
        (
            Amount("lanes", WARP * lanes, device.simt_flops * FITTED.issued),
            Amount("special", WARP * special, device.sfu_ops_per_s * FITTED.issued),
        ),
        beside,
    )
    slots = min(gone.ctas, float(device.sms * at.resident)) or 1.0
    each_s = [batch_s(at, each, moved, device) for each in p.passes]
    chains = sum(chain * s for chain, s in zip(gone.chains, each_s, strict=True))
    longest = visit_s(device) + sum(chain * s for chain, s in zip(gone.longest, each_s, strict=True))
    waits = (Amount("waits", (gone.ctas * visit_s(device) + chains) / slots), Amount("longest node", longest))
    further = max(0, len(p.passes) - 1) if p.busy >= 0 else 0  # launches, for busy nodes
    launch = Amount("launch", (1 + further) * launch_s(device))
    return Counts("segments", (Counts("streams", (memory, issued, *waits), beside), launch))


@dataclass(frozen=True)
class Traffic:
    """Bytes of a launch.

    Attributes:
        in_order: from and to DRAM at least once; ``scattered``: rows at random places that come from it again.
        l2: between the L2 and the SMs.
        far: the share of rows at random places that the L2 does not have.
    """

    in_order: float
    scattered: float
    l2: float
    far: float


def traffic(p: Program, nodes: int, edges: int, device: Device) -> Traffic:
    """What the L2 holds of tables is what is left of it: until a row's next turn, as many of the other bytes pass
    through it as lie between two of a node's edges."""
    tables = {r.number: _row(r) * nodes for r in p.reads.values() if r.place is not Place.FIXED and _is_table(p, r)}
    once = sum(tables.values())
    rows = [p.reads[name] for each in p.passes for name in each.reads]
    again = sum(_moved(r) for r in rows) * edges
    looked_up = sum(_moved(r) for r in rows if _is_table(p, r)) * edges
    own_edges = [r for r in p.reads.values() if r.place is Place.EDGE and not _is_table(p, r)]
    beyond = {r: _beyond(_row(r) * edges, device) if r.index >= 0 else 0.0 for r in own_edges}
    streamed = sum(_row(r) * (1.0 - share) for r, share in beyond.items()) * edges
    indices = 4 * edges * len({r.index for r in p.reads.values() if r.index >= 0})
    own = sum(_row(r) for r in p.reads.values() if r.place is Place.NODE and r.number not in tables) * nodes
    written = sum(_row(s.write) * (edges if s.place is Place.EDGE else nodes) for s in p.stores if s.write)
    passing = sum(_row(r) for r in own_edges) * edges + indices + own + written
    lost = _beyond(once + passing * nodes / max(1, edges), device)
    opened = sum(
        _opened(r) * min(1.0, _row(r) / BURST) for r in rows if _is_table(p, r)
    )  # rows of one burst share turns
    missed = max(0.0, lost * (opened * edges - once))
    of_edges = sum(_opened(r) * share for r, share in beyond.items()) * edges
    return Traffic(
        min(once, looked_up) + streamed + indices + own + written + 4 * nodes,
        missed + of_edges,
        again + indices * len(p.passes) + own + written,
        max([lost if once else 0.0, *beyond.values()]),
    )


def launch_s(device: Device) -> float:
    """Seconds from one launch to the next."""
    return FITTED.launch * device.launch_s


def visit_s(device: Device) -> float:
    """Seconds that a node waits besides those of its edges."""
    return FITTED.visit * device.load_s


def batch_s(at: Layout, each: Pass, moved: Traffic, device: Device) -> float:
    """Seconds of a batch of edges in a warp that has an SM for itself: it waits for the indices, and for the rows that
    they name, from wherever they come; then an instruction waits for the one before."""
    work = at.in_flight(each) * _of_edge(at, each) + BATCH
    waits = FITTED.batch * device.again_s + moved.far * FITTED.from_dram * device.load_s
    return waits + work * device.issue_cycles / device.clock_hz


def _beyond(size: float, device: Device) -> float:
    """The share of so many bytes that the L2 does not hold."""
    return max(0.0, 1.0 - device.l2_bytes * FITTED.held / size) if size else 0.0


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


def _opened(r: Read) -> float:
    """Bytes that DRAM could give in a row while it gives one at a random place."""
    return _moved(r, BURST) + FITTED.opened


def _of_edge(at: Layout, each: Pass) -> float:
    """Instructions of a warp for one edge of each of its teams."""
    indices = {at.p.reads[name].index for name in each.reads} - {-1}
    total = EDGE + INDEX * len(indices)
    for name in each.reads:
        r = at.p.reads[name]
        n, size = at.count(r.axes), ELEMENT_BYTES[r.tensor.dtype]
        loads = at.vectors * ceil(at.vector * size / LANE_BYTES) if n == at.elements else n
        total += LOAD * loads + (n if size == 2 else 0)
    taken = {name for s in each.sums if s.op.combine == "sum" for name in s.operands}
    for s in each.steps:
        total += 0.0 if s.op.kind == "mul" and s.makes in taken and len(s.operands) == 2 else _of_step(at, s)
    return total + sum(_of_sum(at, each, s) for s in each.sums)


def _of_sum(at: Layout, each: Pass, s: Step) -> float:
    n = at.count(s.taken)
    if s.op.combine != "softmax":
        return float(n * max(1, len(s.operands) - 1))
    scores = at.count(at.p.axes(s.operands[0]))
    return n + SCORE * scores + 2.0 * n / at.in_flight(each)


def _special(at: Layout, each: Pass) -> float:
    """Of a lane for one edge, those of the special function unit; of a softmax an exponential of each score."""
    total = sum(at.count(s.taken) * OPS[s.op.kind].transcendental for s in each.steps if s.op.kind != "product")
    return total + sum(at.count(at.p.axes(s.operands[0])) for s in each.sums if s.op.combine == "softmax")


def _of_step(at: Layout, s: Step) -> float:
    n = at.count(s.taken)
    if s.op.kind != "product":
        return n * max(1.0, 1.4 * OPS[s.op.kind].flops if OPS[s.op.kind].transcendental else OPS[s.op.kind].flops)
    shuffles = (min(at.lanes, at.per_run) - 1).bit_length() * at.count(s.axes) if s.taken != s.axes else 0
    return n * max(1, len(s.operands) - 1) + SHUFFLE * shuffles

"""Ragged work on the event loop: a CTA's nodes have as many edges as they have, and the busiest one ends last.

Which node has how many is not known of a histogram: they are taken to lie in a random order, the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilestream.devices import Device
from tilestream.ir.lengths import Lengths, Sizes
from tilestream.ir.pipeline import ELEMENT_BYTES, Role
from tilestream.kernels.segments.cost import batch_s, launch_s, traffic, visit_s
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.kernels.segments.layout import LONG, THREADS, piece_edges
from tilestream.simulator.workload import Engine, SimLaunch, SimStage, TileWork

REGISTERS, WARP_REGISTERS = 65_536, 8
"""Of an SM that kernels are compiled for; those of a thread are given out in eights."""


def shuffled(lengths: Lengths) -> np.ndarray:
    """All lengths as they lie, where that is known, else in a random order."""
    if lengths.each:
        return np.array(lengths.each, dtype=np.int64)
    each = np.repeat(*np.array(lengths.counts, dtype=np.int64).reshape(-1, 2).T)
    return np.random.default_rng(0).permutation(each)


def in_blocks(each: np.ndarray, size: int, how: np.ufunc = np.add) -> np.ndarray:
    """Sums of blocks of ``size`` neighbours; or their maxima."""
    return how.reduceat(each, np.arange(0, len(each), size)) if len(each) else each


def weights(edges: Sequence[float] | np.ndarray, share: float) -> tuple[float, ...]:
    """How much of a tile's work each tile of so many edges is; ``share`` of all work is that of edges."""
    of = np.asarray(edges, dtype=float)
    if not len(of) or not of.sum():
        return ()
    found = (1.0 - share) + share * of / of.mean()
    return tuple((found / found.mean()).tolist())


def segments_launch(kernel: SegmentsKernel, size: Sizes, device: Device) -> SimLaunch:
    """A kernel of the family segments: its own counts, dealt to CTAs by the lengths of their nodes.

    A CTA has as many nodes as it has teams. Where the kernel is told which nodes are busy, those of more than ``LONG``
    edges are dealt out in pieces behind them; further passes over these are launches of their own.
    """
    lengths = size.lengths[kernel.program.edges]
    counts = kernel.cost(lengths.outer, device, lengths.total, lengths)
    teams = max(1, THREADS // kernel.layout.team)
    each = shuffled(lengths)
    long = each[each > LONG] if kernel.program.busy >= 0 else each[:0]
    short = np.where(each > LONG, 0, each) if len(long) else each
    piece = piece_edges(lengths.total)
    pieces = [min(piece, left) for n in long.tolist() for left in range(n, 0, -piece)]
    dealt = np.array(pieces, dtype=np.int64)
    edges = np.concatenate([in_blocks(short, teams), dealt])
    chains = np.concatenate([in_blocks(short, teams, np.maximum), -(-dealt // teams)])
    tiles = max(1, len(edges))
    outputs = kernel.launch.by_role(Role.OUTPUT)
    written = float(sum(size.positions([a.name for a in t.axes]) * ELEMENT_BYTES[t.dtype] for t in outputs))
    whole = TileWork(
        simt_ops=counts["lanes"].seconds * device.simt_flops,
        sfu_ops=counts["special"].seconds * device.sfu_ops_per_s,
        dram_read=max(0.0, counts["dram"].seconds * device.dram_bytes_per_s - written),  # of rows at random places
        dram_write=written,
        l2_read=max(0.0, counts["l2"].seconds * device.l2_bytes_per_s - written),  # of rows at random places
        l2_write=written,
    )
    stage = SimStage(
        kernel.launch.stages[0].name,
        Engine.SIMT,
        tiles,
        min(tiles, kernel.grid(max(1, lengths.outer), device.sms)),
        whole.scaled(1 / tiles),
        registers=THREADS * _registers(kernel),
        shared_bytes=kernel.shared_bytes,
        ops=tuple(op.kind for op in kernel.launch.stages[0].ops),
        source=kernel.launch.stages[0].source,
        overlap=True,
        weights=weights(edges, _share_of_edges(kernel, lengths, device)),
        waits_s=_waits_s(kernel, chains, lengths, device),
    )
    return SimLaunch(kernel.launch.name, (stage,), launch_s=len(kernel.parts(lengths.outer)) * launch_s(device))


def _waits_s(kernel: SegmentsKernel, chains: np.ndarray, lengths: Lengths, device: Device) -> tuple[float, ...]:
    """Of tiles whose longest team goes along so many edges: what a node's bounds and each batch of its edges wait."""
    at = kernel.layout
    moved = traffic(at.p, lengths.outer, lengths.total, device)
    total = np.full(len(chains), visit_s(device))
    for each in at.p.passes:
        batches = np.ceil(chains / (at.in_flight(each) * at.at_once))
        total += batches * batch_s(at, each, moved, device)
    return tuple(total.tolist())


def _registers(kernel: SegmentsKernel) -> int:
    """Of a thread: what the compiler is left by the CTAs that an SM should hold."""
    return REGISTERS // (THREADS * kernel.layout.resident) // WARP_REGISTERS * WARP_REGISTERS


def _share_of_edges(kernel: SegmentsKernel, lengths: Lengths, device: Device) -> float:
    """Of the bytes through the L2: what nodes cost by themselves is what is left where they have no edges."""
    whole, bare = (traffic(kernel.program, lengths.outer, n, device).l2 for n in (lengths.total, 0))
    return 1.0 - bare / whole if whole else 0.0

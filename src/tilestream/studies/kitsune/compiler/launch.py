"""A pipeline of staged operators as one launch of the simulator."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import Queue
from tilestream.simulator.library.stages import start_s
from tilestream.simulator.tables import spilled
from tilestream.simulator.workload import Engine, SimLaunch, SimQueue, SimStage
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.compiler.schedule import tile_of
from tilestream.studies.kitsune.compiler.staged import Staged
from tilestream.studies.kitsune.compiler.tiling import passed, works
from tilestream.studies.kitsune.compiler.ways import levels

TENSOR_REGISTERS = 32_768
SIMT_REGISTERS = 16_384
"""Of a CTA: one tensor and two SIMT CTAs fill an SM, so that all stages are resident under one arbiter too."""
DEPTH = 2
"""Entries of a ring (Kitsune 2.1: double buffers)."""


def launch(p: Staged, graph: OperatorGraph, device: Device) -> SimLaunch:
    """A scheduled pipeline as one launch: its stages, resident together, and rings of ``DEPTH`` or as deep as needed.

    Each pair of a producing and a consuming CTA has a ring of its own, of ``DEPTH`` entries. It holds besides what its
    consumer takes at once, and what passes by on a longer way while it waits (skip connections).
    Queues are to stay in the L2, as the paper's do: where double buffers do not fit into it, they are single ones.
    """
    shape = tile_of(p)
    ctas = {s.name: s.replicas for s in p.pipeline.stages}
    work = works(p, graph, device, shape, ctas)
    stages = []
    for name in p.names:
        w, tensor = work[name], p.engine(name) is Engine.TENSOR
        stages.append(
            SimStage(
                name,
                p.engine(name),
                w.tiles,
                ctas[name],
                w.tile,
                once=w.once,
                registers=TENSOR_REGISTERS if tensor else SIMT_REGISTERS,
                shared_bytes=w.shared_bytes,
                ops=tuple(op.name for op in p.operators[name]),
                source=p.operators[name][0].source,
                overlap=w.overlap,
            )
        )
    made = SimLaunch(p.node.name, tuple(stages), launch_s=start_s(device))
    sizes = passed(p, shape, ctas)
    double, single = (replace(made, queues=_queues(p, made, sizes, depth)) for depth in (DEPTH, 1))
    return double if not spilled(double, device) or spilled(single, device) else single


def _queues(p: Staged, made: SimLaunch, sizes: list[tuple[Queue, float]], depth: int) -> tuple[SimQueue, ...]:
    """A ring for each queue, ``depth`` deep for a pair of CTAs; ``sizes`` are bytes that pass through each."""
    tiles = {s.name: s.tiles for s in made.stages}
    ctas = {s.name: s.ctas for s in made.stages}
    level = levels(p.pipeline)
    queues = []
    for ring, size in sizes:
        apart = max(level[c] - level[ring.producer] for c in ring.consumers)
        taken = max(
            max(ctas[c] for c in ring.consumers), *(ceil(tiles[ring.producer] / tiles[c]) for c in ring.consumers)
        )
        entries = max(depth * apart, ceil(depth * taken / ctas[ring.producer]))
        queues.append(SimQueue(ring.producer, ring.consumers, size / tiles[ring.producer], entries))
    return tuple(queues)

"""A pipeline of any axes as a workload: what its stages compute, move and exchange, dealt to the steps of their CTAs.

For pipelines that no kernel is made of yet, so nothing here is fitted: products at the tensor cores' rate, other ops at
the lanes', bytes by ``ir.mesh_traffic``, exchanges at the latency of where they meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from tilestream.devices import Device
from tilestream.errors import DeviceError, InputError
from tilestream.ir.axes import Level, View
from tilestream.ir.derive import WRITES, divided, exchanges, sums
from tilestream.ir.lengths import Sizes, sizes_of
from tilestream.ir.mesh_traffic import accesses, indices, stage_traffic, through
from tilestream.ir.pipeline import DTYPE_BYTES, ELEMENT_BYTES, Pipeline, Queue, Stage, TileOp, Transport
from tilestream.ir.plain import plain
from tilestream.ir.rings import tiles_of
from tilestream.ir.tileops import OPS
from tilestream.simulator.library.kernels import KEPT
from tilestream.simulator.ragged import in_blocks, shuffled, weights
from tilestream.simulator.workload import Engine, SimLaunch, SimQueue, SimStage, TileWork, Workload


def mesh_workload(pipeline: Pipeline, size: Mapping[str, int], device: Device) -> Workload:
    """``pipeline`` on ``device``; stages behind a DRAM queue are a launch of their own.

    Args:
        size: of every axis, those that are read at the call too; lengths of ragged ones are equal unless it has them.

    Raises:
        DeviceError: a cluster is larger than the device's, or the device has none.
        InputError: the size of an axis is not known.
    """
    p = plain(pipeline)
    size = sizes_of(p, size)
    named = {a for s in p.stages for op in s.ops for a in op.mentions} | {a.name for t in p.tensors for a in t.axes}
    unknown = sorted(named - size.keys())
    if unknown:
        raise InputError(f"the size of {', '.join(unknown)} is read at the call", "say what it is: {'rows': 65536}")
    seen: set[str] = set()
    launches = []
    for number, stages in enumerate(_launches(p)):
        names = {s.name for s in stages}
        made = tuple(_stage(p, s, size, device, seen) for s in stages)
        rings = (q for q in p.queues if q.transport is not Transport.DRAM and q.producer in names)
        queues = tuple(_queue(p, q, size, {s.name: s for s in made}) for q in rings)
        launches.append(SimLaunch(f"{p.name}.{number}", made, queues))
    return Workload(p.name, tuple(launches))


def _launches(p: Pipeline) -> list[list[Stage]]:
    """Stages by the number of DRAM queues before them; those joined on chip are together."""
    level = dict.fromkeys((s.name for s in p.stages), 0)
    for _ in p.stages:
        for q in p.queues:
            for consumer in q.consumers:
                later = level[q.producer] + (q.transport is Transport.DRAM)
                level[consumer] = max(level[consumer], later)
                if q.transport is not Transport.DRAM:
                    level[q.producer] = max(level[q.producer], level[consumer])
    return [[s for s in p.stages if level[s.name] == n] for n in sorted(set(level.values()))]


def _stage(p: Pipeline, stage: Stage, size: Sizes, device: Device, seen: set[str]) -> SimStage:
    cluster = stage.workers(Level.CLUSTER)
    if cluster > device.largest_cluster:
        raise DeviceError(
            f"stage {stage.name!r} is a cluster of {cluster} CTAs, and {device.name} has none of more than"
            f" {device.largest_cluster}",
            "spread it over fewer, or over the grid",
        )
    moved = stage_traffic(p, stage, size)
    steps = stage.rounds(stage.loops[0].axis, size) if stage.loops else 1
    ctas = stage.workers(Level.GRID) * cluster
    tiles = max(1, min(steps * ctas, _blocks(stage, size) * cluster))
    read, written = _dram(p, stage, size, seen, device)
    stored, loaded = _on_l2(p, stage, size)
    products = [op for op in stage.ops if op.kind == "product" and sums(op)]
    flops = sum(2.0 * _elements(op, stage, size) for op in products)
    others = [op for op in stage.ops if op not in products]
    whole = TileWork(
        tensor_flops=flops,
        dtype=_operand_dtype(p, products[0]) if products else "bf16",
        simt_ops=sum(max(1.0, OPS[op.kind].flops) * _elements(op, stage, size) for op in others),
        sfu_ops=sum(OPS[op.kind].transcendental * _elements(op, stage, size) for op in others),
        l2_read=loaded,
        l2_write=stored,
        l2_shared_read=max(0.0, moved["l2"] - stored - loaded),  # parts that all SMs take again at about the same time
        dram_read=read,
        dram_write=written,
        latency_s=_exchange_s(stage, moved, steps, device) * tiles,
    )
    return SimStage(
        stage.name,
        Engine.TENSOR if flops else Engine.SIMT,
        tiles,
        min(ctas, tiles),
        whole.scaled(1 / tiles),
        ops=tuple(op.kind for op in stage.ops),
        source=stage.source,
        overlap=True,
        weights=_weights(stage, size, tiles),
    )


def _weights(stage: Stage, size: Sizes, tiles: int) -> tuple[float, ...]:
    """Of a stage whose tiles are blocks of positions with ragged axes within them; empty where they are equal."""
    outer = stage.loops[0].axis if stage.loops else ""
    within = [axis for axis, around in size.outer.items() if around == outer and axis in stage.outer]
    blocks = ceil(size[outer] / stage.blocks[outer]) if within else 0
    if blocks != tiles or not blocks:
        return ()
    of = {op: len(op.mentions.intersection(within)) for op in stage.ops}
    work = {ragged: sum(_elements(op, stage, size) for op in of if bool(of[op]) is ragged) for ragged in (True, False)}
    each = shuffled(size.lengths[within[0]]) ** max(of.values())  # queries and keys of a sequence: pairs
    return weights(in_blocks(each, stage.blocks[outer]), work[True] / sum(work.values()))


def _operand_dtype(p: Pipeline, product: TileOp) -> str:
    """The type that tensor cores multiply in."""
    known = {t.name: t.dtype for t in (*p.tensors, *p.tiles().values())}
    return known[product.views[-1].of]


def _blocks(stage: Stage, size: Sizes) -> int:
    """Steps of all CTAs of the grid, those that have nothing in the last round left out."""
    grid = [d for d in stage.mesh if d.level is Level.GRID]
    if not stage.loops:
        return prod(d.size for d in grid)
    loop = stage.loops[0]
    inside = prod(d.size for d in stage.mesh if d.level is not Level.GRID and loop.axis in d.axes)
    others = prod(d.size for d in grid if loop.axis not in d.axes)
    return ceil(size[loop.axis] / (loop.tile * inside)) * others


def _elements(op: TileOp, stage: Stage, size: Sizes) -> float:
    """Elements that all workers compute; those that an op is not divided over do the same."""
    alike = prod(d.size for d in stage.mesh if not divided(op, d, stage))
    return float(size.positions(op.mentions) * alike)


def _on_l2(p: Pipeline, stage: Stage, size: Sizes) -> tuple[float, float]:
    """Bytes that a stage stores, and that it loads once; of the rest of its loads many SMs ask at about the same time.

    Rows that are looked up are asked for by nobody else.
    """
    stored, loaded = 0.0, {}
    for op, view, moved in accesses(p, stage, size):
        if op.kind in WRITES and view == op.views[-1]:
            stored += moved
        else:
            once = size.positions(view.axes) * ELEMENT_BYTES[p.tensor(view.of).dtype]
            loaded[view] = float(min(moved, once))
    return stored, sum(loaded.values())


def _dram(p: Pipeline, stage: Stage, size: Sizes, seen: set[str], device: Device) -> tuple[float, float]:
    """Compulsory bytes: each tensor is read by the first stage that wants it, and written once.

    Of one whose rows are read or added to by an index, ``by_index`` says how much.
    """
    read = written = 0.0
    for op in stage.ops:
        for view in op.views[len(op.tiles) :]:
            first, again = by_index(p, view, size, device)
            for index in indices(view):
                if index.of not in seen:
                    seen.add(index.of)
                    read += _bytes(p, index.of, size)
            if op.kind in WRITES:
                written += _bytes(p, view.of, size) + again
                read += again
            else:
                read += again + (0.0 if view.of in seen else first)
                seen.add(view.of)
    tiles = p.tiles()
    for q in p.queues:
        whole = size.positions([a.name for a in tiles[q.tile].axes]) * DTYPE_BYTES[tiles[q.tile].dtype]
        if q.transport is Transport.DRAM:
            written += whole * (stage.name == q.producer)
            read += whole * (stage.name in q.consumers)
    return read, written


def _bytes(p: Pipeline, name: str, size: Sizes) -> float:
    t = p.tensor(name)
    return float(size.positions([a.name for a in t.axes]) * ELEMENT_BYTES[t.dtype])


def _exchange_s(stage: Stage, moved: Mapping[str, int], steps: int, device: Device) -> float:
    """Exposed seconds of a step's exchanges: nothing can be done with a part before its peers' have come."""
    levels = {e.level for e in exchanges(stage)}
    ctas = stage.workers(Level.GRID) * stage.workers(Level.CLUSTER)
    seconds = 0.0
    if Level.CLUSTER in levels:
        seconds += device.dsm_s(moved["dsm"] / (steps * ctas)) + moved["dsm"] / (steps * device.dsm_bytes_per_s)
    if Level.GRID in levels:
        seconds += device.queue_s(moved["l2"] / (steps * ctas))
    return seconds


def _queue(p: Pipeline, q: Queue, size: Sizes, stages: Mapping[str, SimStage]) -> SimQueue:
    """A producing CTA's share of a tile is the payload; a step of either end is equally much as the whole is."""
    cluster = p.stage(q.producer).workers(Level.CLUSTER) if q.transport is Transport.DSM else 0
    tiles = stages[q.producer].tiles
    room = max(1, round(q.depth * tiles / tiles_of(p, q, size)))
    return SimQueue(q.producer, q.consumers, through(p, q, size) / tiles, room=room, cluster=cluster)


def by_index(p: Pipeline, view: View, size: Mapping[str, int], device: Device) -> tuple[float, float]:
    """Bytes of a tensor under ``view``: of all that is meant, each first time, and again for what the L2 no longer has;
    without an index all of it comes once.

    Of N rows, E draws touch N (1 - (1 - 1/N)^E); a row that was touched before is still in the L2 with the share of the
    table that half of the L2 holds. Indices are taken to be spread evenly and independent of each other, as those of a
    graph in no order are: sorted ones are read with fewer misses.
    """
    tensor = p.tensor(view.of)
    each = ELEMENT_BYTES[tensor.dtype]
    whole = float(prod(size[a.name] for a in tensor.axes) * each)
    rows = prod(size[a.name] for at, a in zip(view.at or (), tensor.axes, strict=True) if at.index)
    if rows == 1:
        return whole, 0.0
    touched = float(prod(size[a] for a in view.axes) * each)
    first = whole * (1.0 - (1.0 - 1.0 / rows) ** (touched / (whole / rows)))
    kept = min(1.0, KEPT * device.l2_bytes / whole)
    return first, max(0.0, touched - first) * (1.0 - kept)

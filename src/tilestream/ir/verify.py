"""What a legal pipeline is: a list of named rules, each with its arithmetic in the message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from graphlib import CycleError

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axis_rules import (
    axes_agree,
    axes_are_covered,
    combines_are_defined,
    edges_stay_with_their_nodes,
    partial_results_are_summed,
    peers_exist,
    ragged_axes_lie_in_others,
    rings_hold_what_is_in_flight,
    tensors_have_their_roles,
)
from tilestream.ir.columns import blocked_tiles, column_axis, first_column, hidden_layers, is_part, looped_layers
from tilestream.ir.derive import WRITES
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Queue, Role, Stage, Tensor, Transport
from tilestream.ir.plain import by_rows
from tilestream.ir.shapes import check_shapes
from tilestream.ir.taps import Tap
from tilestream.ir.ways import producers_first

WIDEST = {0: 256, 1: 512}  # features of a tile in registers, by Shard.dim: 128 fp32 accumulators a thread of 128 or 256


def verify(pipeline: Pipeline) -> None:
    """Check that ``pipeline`` cannot deadlock and that its ops agree; ``kernels.fits`` checks it against a device.

    A pipeline that passes completes on the reference machine (``docs/queues.md`` has the proof).

    Raises:
        VerifyError: the first rule that is broken, with the numbers, the user's line and a remedy.
    """
    for rule in ROW_RULES if by_rows(pipeline) else AXIS_RULES:
        rule(pipeline)


def stages_work(p: Pipeline) -> None:
    """Every stage has ops, at least one replica, a known placement, and hands something on."""
    if not p.stages:
        raise VerifyError(f"pipeline {p.name!r} has no stage", "add one, or leave the region to the fallback")
    for stage in p.stages:
        if stage.replicas < 1:
            raise VerifyError(f"{named(stage)} has {stage.replicas} replicas", "use at least 1")
        if not any(op.kind in WRITES for op in stage.ops) and not any(q.producer == stage.name for q in p.queues):
            raise VerifyError(f"{named(stage)} stores nothing and feeds no queue: it has no work", "remove it")


def queues_join(p: Pipeline) -> None:
    """Every queue has consumers that take its tile, once each."""
    for q in p.queues:
        if not q.consumers:
            raise VerifyError(f"{_queue(q)} has no consumer", "name the stages that take the tile, or remove the queue")
        for consumer in q.consumers:
            if consumer != q.producer and q.tile not in p.stage(consumer).taken():
                raise VerifyError(
                    f"{_queue(q)}: stage {consumer!r} never uses the tile", "remove it from the consumers"
                )
    for (tile, consumer), n in Counter((q.tile, c) for q in p.queues for c in q.consumers).items():
        if n > 1:
            raise VerifyError(f"stage {consumer!r} is delivered tile {tile!r} {n} times", "keep one queue")
    for (tile, transport), n in Counter((q.tile, q.transport) for q in p.queues).items():
        if n > 1:
            raise VerifyError(
                f"tile {tile!r} is in {n} {transport.value} queues", "give one queue all the consumers (multicast)"
            )


def stage_graph_is_acyclic(p: Pipeline) -> None:
    """No stage waits for itself, directly or through others."""
    try:
        producers_first(p)
    except CycleError as error:
        raise VerifyError(
            f"the stages of pipeline {p.name!r} wait for each other: {' -> '.join(error.args[1])}",
            "put the stages of the cycle into one stage",
        ) from None


def queues_hold_a_step(p: Pipeline) -> None:
    """A queue on chip holds what every replica at each of its ends takes or makes in one step, and two tiles at least.

    Two, because any stage between its ends may need two tiles at once before it lets go of the first.
    """
    for q in p.queues:
        if q.transport is Transport.DRAM:
            if q.depth:
                raise VerifyError(f"{_queue(q)} has depth {q.depth}", "a DRAM queue holds every tile: use depth 0")
            continue
        for stage in map(p.stage, (q.producer, *q.consumers)):
            need = stage.tiles_per_step * stage.replicas
            if q.depth < need:
                raise VerifyError(
                    f"{_queue(q)} has depth {q.depth} < {need} = {stage.tiles_per_step} tiles a step"
                    f" x {stage.replicas} replicas of stage {stage.name!r}",
                    f"use a depth of at least {need + need % 2}",
                )
        if q.depth % 2:
            raise VerifyError(
                f"{_queue(q)} has depth {q.depth}, which is odd: a step of two tiles would not fit, or wrap around",
                f"use {q.depth + 1}",
            )


def tiles_are_used(p: Pipeline) -> None:
    """Every tile is used by an op of its stage or handed on."""
    queued = {q.tile for q in p.queues}
    for stage in p.stages:
        used = queued | {name for op in stage.ops for name in op.ins}
        for op in stage.ops:
            if op.out is not None and op.out.name not in used:
                where = op.source or named(stage)
                raise VerifyError(f"nobody uses tile {op.out.name!r} ({op.kind} at {where})", "remove the op")


def outputs_are_stored_once(p: Pipeline) -> None:
    """Each output is stored by exactly one op, or by several that write each of its columns once."""
    tiles = p.tiles()
    stores = Counter(op.params[0] for s in p.stages for op in s.ops if op.kind == "store" and not is_part(op))
    parts: dict[str, list[tuple[int, int]]] = {}
    for op in (op for s in p.stages for op in s.ops if op.kind == "store" and is_part(op)):
        parts.setdefault(op.params[0], []).append((first_column(op), tiles[op.ins[0]].features))
    for tensor in p.by_role(Role.OUTPUT):
        if tensor.name in parts and tensor.name not in stores:
            _tile_the_columns(tensor, sorted(parts[tensor.name]))
            continue
        if stores[tensor.name] != 1:
            raise VerifyError(f"output {tensor.name!r} is stored {stores[tensor.name]} times", "store it exactly once")


def _tile_the_columns(tensor: Tensor, parts: list[tuple[int, int]]) -> None:
    at = 0
    for first, columns in [*parts, (tensor.features, 0)]:
        if first != at:
            raise VerifyError(
                f"columns {min(at, first)} to {max(at, first)} of output {tensor.name!r} are stored"
                f" {'twice' if first < at else 'by nobody'}",
                "store each column exactly once",
            )
        at = first + columns


def tiles_fit_registers(p: Pipeline) -> None:
    """A tile in registers is at most as wide as the placement of its stage allows.

    Operands of linears, parts of a cat and what a slice is cut from stay in shared or device memory at any width.
    """
    tiles = p.tiles()
    for stage in p.stages:
        widest = WIDEST[stage.placement.dim]
        in_parts = {name for layer in looped_layers(stage) for name in layer.names}
        blocked = blocked_tiles(stage.ops, stage.loops).keys()
        in_parts |= blocked | {n for op in stage.ops if op.out and op.out.name in blocked for n in op.ins}
        for name in _in_registers(p, stage):
            if name in in_parts:
                continue
            width = tiles[name].features
            if width > widest:
                raise VerifyError(
                    f"{named(stage)}: tile {name!r} has {width} features > {widest},"
                    f" the widest that Shard({stage.placement.dim}) holds in registers",
                    "use Shard(1)" if width <= WIDEST[1] else "split the layer over several stages",
                )


def loops_are_of_layers(p: Pipeline) -> None:
    """A loop over columns is over a layer that one linear alone reads, and all that it is made of; or it holds what a
    linear makes."""
    for stage in p.stages:
        known = {layer.axis for layer in hidden_layers(stage, [q.tile for q in p.queues])}
        linears = {column_axis(op.out.name) for op in stage.ops if op.kind == "linear" and op.out is not None}
        for loop in stage.loops[1:]:
            if loop.held and loop.axis not in linears:
                raise VerifyError(
                    f"{named(stage)} holds {loop.axis!r}, which are no columns that a linear of its makes",
                    "remove the loop",
                )
            if not loop.held and loop.axis not in known:
                raise VerifyError(
                    f"{named(stage)} loops over {loop.axis!r}, which is no hidden layer of its own: a linear's columns,"
                    " with ops element by element behind it, that one other linear alone reads",
                    "remove the loop",
                )


def taps_share_a_picture(p: Pipeline) -> None:
    """All taps make the pixels of equally large pictures: those are the rows."""
    taps = [(op, tap) for s in p.stages for op in s.ops if (tap := Tap.of(op)) is not None]
    for op, tap in taps:
        first, one = taps[0]
        if (tap.height, tap.width) != (one.height, one.width):
            raise VerifyError(
                f"load at {op.source or op.params[0]} makes rows of {tap.height} x {tap.width} pixels, but load at"
                f" {first.source or first.params[0]} of {one.height} x {one.width}",
                "put them into pipelines of their own",
            )


def launches_in_order(p: Pipeline) -> None:
    """The DRAM queues cut the pipeline into launches that can run one after another."""
    try:
        cut_at_dram(p)
    except IRError as error:
        raise VerifyError(
            f"pipeline {p.name!r} cannot be cut at its DRAM queues: {error.cause}", error.remedy
        ) from error


ROW_RULES: tuple[Callable[[Pipeline], None], ...] = (
    stages_work,
    check_shapes,
    queues_join,
    stage_graph_is_acyclic,
    queues_hold_a_step,
    tiles_are_used,
    outputs_are_stored_once,
    tiles_fit_registers,
    loops_are_of_layers,
    taps_share_a_picture,
    launches_in_order,
)


AXIS_RULES: tuple[Callable[[Pipeline], None], ...] = (
    stages_work,
    queues_join,
    stage_graph_is_acyclic,
    tiles_are_used,
    tensors_have_their_roles,
    axes_agree,
    ragged_axes_lie_in_others,
    axes_are_covered,
    combines_are_defined,
    edges_stay_with_their_nodes,
    partial_results_are_summed,
    peers_exist,
    rings_hold_what_is_in_flight,
)


def named(stage: Stage) -> str:
    return f"stage {stage.name!r}" + (f" ({stage.source})" if stage.source else "")


def _queue(q: Queue) -> str:
    return f"queue of {q.tile!r} from {q.producer!r}" + (f" ({q.source})" if q.source else "")


def _in_registers(p: Pipeline, stage: Stage) -> list[str]:
    """Tiles that some op of ``stage`` computes with or hands on, in order."""
    cats = {op.out.name for op in stage.ops if op.kind == "cat" and op.out is not None}
    names: list[str] = []
    for op in stage.ops:
        made = (op.out.name,) if op.out is not None else ()
        if op.kind == "linear":
            names += made
        elif op.kind == "store":
            names += (n for n in op.ins if n not in cats)  # a cat is stored part by part
        elif op.kind not in ("load", "cat", "slice"):
            names += (*op.ins, *made)
    on_chip = [q for q in p.queues if q.transport is not Transport.DRAM or q.tile not in cats]  # DRAM: a store
    return names + [q.tile for q in on_chip if q.producer == stage.name]

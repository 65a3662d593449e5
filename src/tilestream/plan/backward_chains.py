"""Backward chains: a region that makes gradients row by row, and the stationary sums that read them, as one kernel.

Apart, every dY is written, and read again by the sums. Together it stays on chip. Chains are as long as the sums that a
warpgroup keeps in registers; a longer one is cut, and leaves the dY between its parts in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, Level, Loop, Spread, View, along
from tilestream.ir.pipeline import TILE_ROWS, Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.ir.plain import by_rows, plain
from tilestream.kernels.gradients import Chain, Layer, builds, find_chain, room
from tilestream.kernels.gradients.layouts import GROUPS

STRATEGY = "backward chain"


@dataclass(frozen=True)
class Joined:
    """A chain in one launch or several, in order.

    Attributes:
        turned: parameters of the region that the launches take transposed: ``[out, in]``, as the forward pass does.
        between: tensors that a launch leaves for the next one.
    """

    pipelines: tuple[Pipeline, ...]
    turned: tuple[str, ...]
    between: tuple[str, ...]


def join(
    region: Pipeline, sums: Pipeline, same: Mapping[str, str], wanted: Collection[str], rows: int, device: Device
) -> Joined:
    """The chain that a region and the stationary sums of what it makes are together.

    Args:
        region: of one stage, in ops of rows. sums: as ``plan.gradients.weight_gradients`` makes them.
        same: inputs of ``sums`` that are inputs or outputs of ``region``, by name.
        wanted: outputs of ``region`` that others than ``sums`` read.

    Raises:
        VerifyError: they are no backward chain that kernels can be made of.
    """
    whole, turned = _together(region, sums, same, wanted)
    stage = whole.stages[0]
    chain = find_chain(stage, whole)
    ctas = max(1, min(device.sms, ceil(rows / (GROUPS * TILE_ROWS))))
    mesh = tuple(
        Spread(level, size, (ROWS.name,))
        for level, size in ((Level.GRID, ctas), (Level.WARPGROUP, GROUPS))
        if size > 1 or level is Level.WARPGROUP
    )
    left = dict(chain.left)
    parts = [part for layers in _between_left(chain) for part in _parts(layers, whole)]
    made, between = [], []
    for n, part in enumerate(parts):
        first = "" if n == 0 else between[-1]
        last = "" if n == len(parts) - 1 else left.get(part[-1].result, f"between{n}")
        between += [last] if last else []
        made.append(_part(whole, part, first, last, mesh, n))
    for pipeline in made:
        builds(pipeline)
    return Joined(tuple(made), turned, tuple(between))


def _together(
    region: Pipeline, sums: Pipeline, same: Mapping[str, str], wanted: Collection[str]
) -> tuple[Pipeline, tuple[str, ...]]:
    """One stage with the ops of both, in plain form, and the parameters that it takes transposed."""
    if len(region.stages) != 1 or not by_rows(region):
        raise VerifyError(f"pipeline {region.name!r} has {len(region.stages)} stages", "make it of one")
    written = plain(replace(region, stages=(Stage.of("chain", region.stages[0].ops),)))
    ops = list(written.stages[0].ops)
    tensors = {t.name: t for t in written.tensors}
    turned = tuple(t.name for t in region.by_role(Role.PARAMETER))
    for name in turned:
        t = tensors[name]
        if len(t.axes) != 2:
            raise VerifyError(f"parameter {name!r} is no matrix", "use a row stream")
        tensors[name] = replace(t, axes=t.axes[::-1])
    ops = [_with_turned(op, turned) for op in ops]
    loads = {op.params[0]: op.out for op in ops if op.kind == "load" and op.out is not None}
    tiles = {op.out.name: op.out for op in ops if op.out is not None}
    left = {op.params[0]: tiles[op.ins[0]] for op in ops if op.kind == "store"}
    ends: list[TileOp] = []
    for stage in sums.stages:
        known: dict[str, Tile] = {}
        for op in stage.ops:
            if op.kind == "load":
                name = same.get(op.params[0], op.params[0])
                tile = loads.get(name) or left.get(name)
                if tile is None:
                    tile, tensors[name] = op.made, sums.tensor(name)
                    loads[name] = tile
                    ops.append(op)
                known[op.made.name] = tile
            elif op.kind == "store":
                ends.append(op)
            else:
                ops.append(_over(op, known))
    ops = [op for op in ops if op.kind != "store" or op.params[0] in wanted]
    made = {op.out.name: op.out for op in ops if op.out is not None}
    for op in ends:  # of columns that were padded there are none here
        axes, name = made[op.ins[0]].axes, op.params[0]
        tensors[name] = replace(sums.tensor(name), axes=axes)
        under = [a.name for a in axes]
        ops.append(replace(op, tiles=(along(op.ins[0], under),), tensors=(along(name, under),)))
    ops = _rounded(ops)
    used = {name for op in ops for name in op.params}
    stage = Stage("chain", tuple(ops), (Loop(ROWS.name, TILE_ROWS),), ())
    return Pipeline("chain", tuple(t for n, t in tensors.items() if n in used), (stage,)), turned


def _with_turned(op: TileOp, turned: Collection[str]) -> TileOp:
    """``op`` with the coordinates of matrices turned."""
    own = op.views[len(op.tiles) :]
    views = tuple(View(v.of, v.at[::-1]) if v.of in turned and v.at is not None else v for v in own)
    return replace(op, tensors=views) if views != own else op


def _over(op: TileOp, known: Mapping[str, Tile]) -> TileOp:
    """A sum over rows of tiles that another stage made, under the axes that they have there."""
    tiles = [known[name] for name in op.ins]
    if any(len(tile.axes) != 2 for tile in tiles):
        raise VerifyError("a sum's operand has one column, and so no axis of columns", "leave the sums apart")
    axes = [next(a for a in tile.axes if a != ROWS) for tile in tiles]
    out = replace(op.made, axes=tuple(axes))
    views = tuple(along(t.name, (ROWS.name, a.name)) for t, a in zip(tiles, axes, strict=True))
    return replace(op, out=out, tiles=views)


def _rounded(ops: Sequence[TileOp]) -> list[TileOp]:
    """A gradient that is summed for a bias as well is rounded first: it was, when it came from memory."""
    summed = {op.ins[0] for op in ops if op.kind == "sum"}
    made: list[TileOp] = []
    names: dict[str, str] = {}
    for op in ops:
        if not names.keys().isdisjoint(op.ins):
            op = replace(op, tiles=tuple(View(names.get(v.of, v.of), v.at) for v in op.views[: len(op.tiles)]))
        made.append(op)
        if op.out is not None and op.out.name in summed and op.kind not in ("load", "cast"):
            cast = replace(op.out, name=f"{op.out.name}.rounded")
            own = along(op.out.name, [a.name for a in op.out.axes])
            made.append(TileOp("cast", cast, (own,), source=op.source))
            names[op.out.name] = cast.name
    return made


def _between_left(chain: Chain) -> list[tuple[Layer, ...]]:
    """A chain's layers, cut where a gradient between two of them leaves: the next launch finds it in memory."""
    left = dict(chain.left)
    ends = [n + 1 for n, layer in enumerate(chain.layers) if layer.result in left]
    return [chain.layers[a:b] for a, b in pairwise((0, *ends, len(chain.layers)))]


def _parts(layers: tuple[Layer, ...], whole: Pipeline) -> list[tuple[Layer, ...]]:
    """Layers, in order, as few parts as one launch each has room for; of about as many layers each, where that does.

    Raises:
        VerifyError: there is no room for one layer alone.
    """
    greedy: list[list[Layer]] = [[]]
    for layer in layers:
        if greedy[-1] and not _fits((*greedy[-1], layer), whole):
            greedy.append([])
        greedy[-1].append(layer)
    for part in greedy:
        room(part, whole)
    size = ceil(len(layers) / len(greedy))
    even = [layers[k : k + size] for k in range(0, len(layers), size)]
    return even if all(_fits(part, whole) for part in even) else [tuple(part) for part in greedy]


def _fits(layers: Sequence[Layer], whole: Pipeline) -> bool:
    try:
        room(layers, whole)
    except VerifyError:
        return False
    return True


def _part(
    whole: Pipeline, layers: Sequence[Layer], first: str, last: str, mesh: tuple[Spread, ...], number: int
) -> Pipeline:
    """The launch of some layers: it loads ``first``, if that is a name, as its dY, and leaves ``last``."""
    ops = whole.stages[0].ops
    inside = {id(op) for layer in layers for op in layer.members}
    made = [op for op in ops if id(op) in inside]
    tiles = {op.out.name: op.out for op in ops if op.out is not None}
    own = {op.out.name for op in made if op.out is not None}
    needed = {name for op in made for name in op.ins} - own
    loads = [op for op in ops if op.kind == "load" and op.out is not None and op.out.name in needed]
    tensors = {t.name: t for t in whole.tensors}
    missing = needed - {op.out.name for op in loads if op.out is not None}
    for name in missing:  # dY that the launch before has left
        assert first
        tile = tiles[name]
        tensors[first] = Tensor(first, Role.INPUT, tile.axes, tile.dtype)
        loads.insert(0, TileOp("load", tile, (), (along(first, [a.name for a in tile.axes]),)))
    stores = [op for op in ops if op.kind == "store" and op.ins[0] in own]
    if last and last not in {op.params[0] for op in stores}:
        tile = tiles[layers[-1].result]
        tensors[last] = Tensor(last, Role.OUTPUT, tile.axes, tile.dtype)
        named = [a.name for a in tile.axes]
        stores.append(TileOp("store", None, (along(tile.name, named),), (along(last, named),)))
    every = (*loads, *made, *stores)
    used = {name for op in every for name in op.params}
    stage = Stage("chain", every, (Loop(ROWS.name, TILE_ROWS),), mesh)
    kept = tuple(t for t in tensors.values() if t.name in used)
    return Pipeline(f"chain{number}", kept, (stage,), strategy=STRATEGY)

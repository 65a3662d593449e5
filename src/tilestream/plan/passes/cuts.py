"""Where a program is cut into stages: the whole chain in one, or as few and as narrow cuts as fit; stages on different
SMs, joined by queues through the L2, wide layers on several; or one stage a kernel, as eager execution with fused
epilogues has it, the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Residency, Tile, TileOp, Transport
from tilestream.ir.tileops import FIRST, OPS
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.plan.passes.fit import isolated, isolated_stage, narrowest, problem
from tilestream.plan.passes.segments import Body, body, cut

Form = Callable[[Pipeline], Pipeline]
"""How the stages that are cut run: what is asked for a place on an SM, and handed on."""


def as_it_is(p: Pipeline) -> Pipeline:
    return p


def cut_vertical(program: Pipeline, device: Device, form: Form = as_it_is) -> Pipeline:
    """One stage, or several launches joined by DRAM queues: the cuts that the fewest bytes cross.

    Cuts lie between linears; if that is not enough (the products of a stage have one dtype), beside casts too.
    Among cuts with equal traffic the fewest launches win.

    Raises:
        VerifyError: some linear with its neighbours fits no SM by itself; the message says why.
    """
    parts = body(program)
    reason = _reason(parts, 0, len(parts.ops), device, form)
    if not reason:
        return form(cut(parts, [], Transport.DRAM, "vertical"))
    found = _cheapest(parts, parts.narrowest_cuts(), device, form)
    if found is None:
        parts = body(program, cheap=("load",))
        beside_casts = {c for i, op in enumerate(parts.ops) if op.kind == "cast" for c in (i, i + 1)}
        inner = {c for c in beside_casts if 0 < c < len(parts.ops)}
        if inner:
            found = _cheapest(parts, sorted(inner | set(parts.narrowest_cuts())), device, form)
    if found is None:
        raise VerifyError(f"no cut into launches fits: {reason}", "leave the region to Inductor")
    return form(cut(parts, found, Transport.DRAM, "vertical"))


def _cheapest(parts: Body, positions: list[int], device: Device, form: Form) -> list[int] | None:
    """The subset of ``positions`` to cut at, by dynamic programming over the last cut; None if nothing fits."""
    bounds = [0, *positions, len(parts.ops)]
    best: list[tuple[int, int, list[int]] | None] = [(0, 0, [])] + [None] * (len(bounds) - 1)
    for stop in range(1, len(bounds)):
        for start in range(stop - 1, -1, -1):
            if _reason(parts, bounds[start], bounds[stop], device, form):
                break  # a longer piece needs no less
            before = best[start]
            if before is None:
                continue
            crossed = parts.width_of(bounds[start]) if start else 0
            cuts = [*before[2], bounds[start]] if start else []
            option = (before[0] + crossed, before[1] + 1, cuts)
            current = best[stop]
            if current is None or option[:2] < current[:2]:
                best[stop] = option
    last = best[-1]
    return None if last is None else last[2]


def _reason(parts: Body, start: int, stop: int, device: Device, form: Form) -> str:
    """Why the ops from ``start`` to ``stop`` do not fit one stage; empty if they do."""
    inner = [b for b in (start, stop) if 0 < b < len(parts.ops)]
    pipeline = form(cut(parts, inner, Transport.DRAM, "vertical"))
    return narrowest(isolated_stage(pipeline, "s1" if start else "s0"), device)[1]


SLACK = 1.1  # a stage may take this much longer than its share before another stage is opened


def split_spatial(program: Pipeline, device: Device, layers_per_stage: int = 1) -> Pipeline:
    """Cut between linears into stages of about equal work, at the narrowest places, with L2 queues.

    Equal means the work of the ``layers_per_stage`` heaviest linears: small layers join a neighbour, since a small
    stage by itself is the slowest (its hand-over is not). A stage of one layer's work keeps its weights resident if
    each of its parts could. A tile with several consumers is multicast; one that a later stage takes skips.

    Raises:
        VerifyError: there is nothing to split.
    """
    parts, look = body(program), _looks(program, device)
    pieces = parts.pieces()
    heaviest = sorted((look(piece).seconds for piece in pieces), reverse=True)
    share = sum(heaviest[:layers_per_stage]) * SLACK
    cuts = _cuts(pieces, look, share, layers_per_stage, lambda added: added.work_s)
    if not cuts:  # all layers are small: as far as their waits too would fill a share
        cuts = _cuts(pieces, look, share, layers_per_stage, lambda added: added.seconds)
    if not cuts:
        raise VerifyError(f"{layers_per_stage} layers a stage put the whole region into one stage", "use fewer")
    return cut(parts, cuts, Transport.L2, "spatial")


def _cuts(
    pieces: Sequence[tuple[int, int]],
    look: Callable[[tuple[int, int]], _Look],
    share: float,
    layers_per_stage: int,
    adds: Callable[[_Look], float],
) -> list[int]:
    """Where stages begin, behind the first. A piece joins the stage before it where what it ``adds`` leaves that at its
    ``share``, in seconds a tile."""
    cuts: list[int] = []
    start, stage = pieces[0][0], look(pieces[0])
    used = stage.seconds
    for piece in pieces[1:]:
        next_one = look(piece)
        if used + adds(next_one) <= share:
            joined = look((start, piece[1]))
            keeps = joined.resident or layers_per_stage > 1 or not (stage.resident and next_one.resident)
            if joined.fits and keeps:
                stage, used = joined, used + adds(next_one)
                continue
        cuts.append(piece[0])
        start, stage, used = piece[0], next_one, next_one.seconds
    return cuts


@dataclass(frozen=True)
class _Look:
    """What a stage of some ops would be like: whether it fits, with weights resident too, and seconds a tile.

    ``work_s`` is without waits for inputs, of which it has none behind ops of the same stage.
    """

    fits: bool
    resident: bool
    seconds: float
    work_s: float


@lru_cache(maxsize=8)
def _looks(program: Pipeline, device: Device) -> Callable[[tuple[int, int]], _Look]:
    """What a stage of some of a program's ops would be like: every candidate asks for the same ones."""
    return cache(partial(_look, body(program), device))


def _look(parts: Body, device: Device, piece: tuple[int, int]) -> _Look:
    inner = [b for b in piece if 0 < b < len(parts.ops)]
    pipeline = cut(parts, inner, Transport.DRAM, "spatial")
    alone = isolated(pipeline)["s1" if piece[0] else "s0"]
    placement, reason = narrowest(alone, device)
    resident = not problem(alone, device, placement, Residency.RESIDENT)
    if reason:
        return _Look(False, False, 0.0, 0.0)
    stage = alone.stages[0].with_(placement=placement, residency=Residency.RESIDENT)
    cost = stage_cost(stage, alone, device)
    without = cost.step_s - cost.step["inputs"].seconds
    return _Look(True, resident, cost.step_s / stage.tiles_per_step, without / stage.tiles_per_step)


EPILOGUE = ("unary", "binary")


def split_bulk(program: Pipeline, device: Device, epilogues: bool = True) -> Pipeline:
    """Cut before each linear, and behind the unary and binary ops that follow one; DRAM queues between.

    ``epilogues=False`` cuts directly behind each linear: what Inductor does by default, with one kernel for all that
    lies between two products.

    Norms, reductions and concatenations are kernels of their own, as a library GEMM cannot take them in. A
    concatenation that is too wide for registers joins the linear behind it.
    """
    parts = body(program, cheap=("load",))
    cuts = _kernel_starts(parts, epilogues)
    pipeline = cut(parts, cuts, Transport.DRAM, "bulk")
    alone = isolated(pipeline)
    wide = {
        stage.name
        for stage in pipeline.stages[:-1]
        if all(op.kind in ("load", "cat", "slice") for op in stage.ops) and narrowest(alone[stage.name], device)[1]
    }
    if not wide:
        return pipeline
    kept = [c for i, c in enumerate(cuts) if f"s{i}" not in wide]
    return cut(parts, kept, Transport.DRAM, "bulk")


def _kernel_starts(parts: Body, epilogues: bool) -> list[int]:
    cuts: list[int] = []
    in_linear = False
    for i, op in enumerate(parts.ops):
        family = OPS[op.kind].family
        fusable = (
            op.kind == "store"
            or (in_linear and epilogues and family in EPILOGUE)
            or (not in_linear and family != "linear")
        )
        if i and not fusable:
            cuts.append(i)
        if i == 0 or not fusable:
            in_linear = family == "linear"
    return cuts


CHUNK_BYTES = 128
"""Of a row, what a bulk copy writes at once: parts begin on it."""


def split_columns(program: Pipeline, device: Device, columns: int = 128) -> Pipeline:
    """A stage for every ``columns`` columns of every linear, with the ops element by element behind it.

    The parts of a layer read the same tiles and multiply side by side, so that a tile takes a share of the time that
    one SM would, and a part's weights stay in shared memory where the layer's would not fit. Each part is multicast to
    all parts of the layer that reads it, which joins them by ``cat``. Layers with other ops behind them (norms, which
    need whole rows) and layers no wider than ``columns`` are one stage.

    Raises:
        VerifyError: no layer is wider than ``columns``, or the stages are more than the device has SMs.
    """
    parts = body(program)
    pieces = [parts.ops[start:stop] for start, stop in parts.pieces()]
    divided = [_Layer(piece, columns) if _divides(piece, columns) else None for piece in pieces]
    if not any(divided):
        raise VerifyError(
            f"no layer is wider than {columns} columns, with nothing but ops element by element behind it",
            "use layers_per_stage",
        )
    stages = sum(len(layer.starts) if layer else 1 for layer in divided)
    if stages > device.sms:
        raise VerifyError(
            f"layers by {columns} columns are {stages} stages > {device.sms} SMs of {device.name}", "use wider parts"
        )
    whole: dict[str, TileOp] = {}
    ops: list[TileOp] = []
    cuts: list[int] = []
    tiles = program.tiles()
    for piece, layer in zip(pieces, divided, strict=True):
        for made in (piece,) if layer is None else layer.parts(tiles, whole):
            ops += made
            cuts.append(len(ops))
    joined = Body(program, tuple(ops), {**parts.remade, **whole})
    return cut(joined, cuts[:-1], Transport.L2, "spatial")


def _divides(piece: Sequence[TileOp], columns: int) -> bool:
    """Whether every op can be done for some of the columns: a linear, and ops element by element as wide."""
    first = piece[0]
    if first.kind != "linear" or first.out is None or first.out.features <= columns:
        return False
    width = first.out.features
    made = {op.out.name for op in piece if op.out is not None}
    for op in piece[1:]:
        if op.kind == "store":
            if op.ins[0] not in made:
                return False
        elif OPS[op.kind].family not in ("unary", "binary") or op.out is None or op.out.features != width or op.params:
            return False
    return columns * DTYPE_BYTES[first.out.dtype] % CHUNK_BYTES == 0


@dataclass
class _Layer:
    """A linear and the ops behind it, to be done by ``columns``."""

    ops: Sequence[TileOp]
    columns: int
    starts: range = field(init=False)

    def __post_init__(self) -> None:
        self.starts = range(0, self.ops[0].made.features, self.columns)

    @property
    def name(self) -> str:
        return self.ops[0].made.name

    def parts(self, tiles: dict[str, Tile], whole: dict[str, TileOp]) -> list[list[TileOp]]:
        """The ops of each part; ``whole`` gets a concatenation for each tile that others may want whole."""
        made = [op.out for op in self.ops if op.out is not None]
        for tile in made:
            whole[tile.name] = TileOp("cat", tile, tuple(f"{tile.name}@{at}" for at in self.starts))
        beside = {part for op in whole.values() for part in op.ins}
        return [self._part(at, tiles, beside) for at in self.starts]

    def _part(self, at: int, tiles: dict[str, Tile], beside: set[str]) -> list[TileOp]:
        """``beside``: parts that there are of this layer's tiles and of others of the same width."""
        out: list[TileOp] = []
        part = ((FIRST, at),)
        cut_out: set[str] = set()
        for op in self.ops:
            if op.kind == "linear":
                out.append(replace(op, out=self._narrow(op.out, at), attrs=(*op.attrs, *part)))
                continue
            names = {}
            for name in op.ins:
                tile = self._narrow(tiles[name], at)
                if tile.name in beside:
                    names[name] = tile.name
                elif tiles[name].features != 1:
                    names[name] = f"{tile.name}.{self.name}"
                    if names[name] not in cut_out:
                        cut_out.add(names[name])
                        ends = (("start", at), ("stop", at + tile.features))
                        out.append(TileOp("slice", replace(tile, name=names[name]), (name,), (), ends, op.source))
            if op.out is None:
                out.append(replace(op.reading(names), attrs=(*op.attrs, *part)))
            else:
                out.append(replace(op.reading(names), out=self._narrow(op.out, at)))
        return out

    def _narrow(self, tile: Tile | None, at: int) -> Tile:
        assert tile is not None
        return Tile.of(f"{tile.name}@{at}", min(self.columns, tile.features - at), tile.dtype)

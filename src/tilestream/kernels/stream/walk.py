"""The walk over a stage's ops: each product begins a step, and takes the operations that follow it in registers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from tilestream.errors import VerifyError
from tilestream.ir.columns import LoopedLayer, first_column, looped_layers
from tilestream.ir.float32 import by_parts
from tilestream.ir.macros import expand
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Stage, Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.kernels.parts.taps import check_tap
from tilestream.kernels.stream.blocks import START, by_blocks
from tilestream.kernels.stream.legal import check_blocks, check_group, check_layers, check_own, operand_dtype
from tilestream.kernels.stream.model import ACC_LIMIT, ColumnLoop, Sink, Stream, columns_of

MOST_PACKED = 512
"""Columns of a left operand that a warpgroup can have in registers: 128 of a thread."""


@dataclass
class Draft:
    """A step under construction."""

    features: int
    layer: LoopedLayer | None = None  # whose columns it makes chunk by chunk
    linear: TileOp | None = None
    nodes: list[TileOp] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)


class Walk:
    """What the ops of one stage have become: steps under construction, and where each tile comes from.

    Attributes:
        tiles, features: every tile by name, and its columns; those that the walk makes are added.
        blocks: of tiles that are made block by block of their columns, the blocks' names in order.
        layers: of tiles that are taken by chunks of their columns, the layers that they are in.
        dtype: of the operands of all products.
        drafts: the steps, in order.
        step_of: the step that makes a tile.
        streams: tiles that come from memory or a queue, column by column as they are asked for.
        views: slices of tiles, as the tile and its column where they begin.
        cats: concatenations, as their parts.
        floating: functions of streams alone: of no step until one wants them whole.
        rows: tiles of one number a row, in registers.
        maxima: maxima over rows, which can only be stored.
        shared: tiles that must be in shared memory, since views or copies read them there.
        copies: of a tile, by its name and the dtype of the copy, or ``packed`` for registers that products read.
        joined: the last step that further functions of streams may join.
        own: tiles whose rows lanes load themselves, as registers that products read.

    Raises:
        VerifyError: no kernel runs the stage as it is placed, with the user's line where one is to blame.
    """

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self.stage, self.pipeline = stage, pipeline
        every = pipeline.tiles()
        self.tiles: dict[str, Tile] = dict(every)
        self.features = {n: t.features for n, t in every.items()}
        blocked = by_blocks(expand(stage.ops, self.features, by_parts(pipeline)), stage.loops, every)
        self.ops, self.blocks, self.block_names = blocked.ops, blocked.blocks, blocked.names
        for op in self.ops:
            if op.out is not None:
                self.tiles.setdefault(op.out.name, op.out)
                self.features[op.out.name] = op.out.features
        self.layers = {name: layer for layer in looped_layers(stage) for name in layer.names}
        self.dtype = operand_dtype(stage, pipeline, self.tiles)
        check_group(stage, pipeline)
        if self.blocks:
            check_blocks(stage, pipeline, self.dtype, self.blocks)
        if self.layers:
            check_layers(stage, self.dtype, next(iter(self.layers.values())))
        self.drafts: list[Draft] = []
        self.step_of: dict[str, int] = {}
        self.streams: dict[str, Stream] = {}
        self.views: dict[str, tuple[str, int]] = {}
        self.cats: dict[str, tuple[str, ...]] = {}
        self.floating: dict[str, TileOp] = {}
        self.rows: set[str] = set()
        self.maxima: dict[str, TileOp] = {}
        self.shared: set[str] = set()
        self.copies: dict[tuple[str, str], str] = {}
        self.joined = -2
        self.own: set[str] = set()

    # -- what tiles are

    def stored(self, name: str) -> str:
        """The dtype that a tile has in memory: its own where it streams in, or is that of products; else f32."""
        if name in self.views:
            name = self.views[name][0]
        if name in self.streams:
            return self.streams[name].dtype
        return self.dtype if self.tiles[name].dtype == self.dtype else "f32"

    @property
    def pass_columns(self) -> int:
        """Columns of a turn of an epilogue: a chunk of the type of fewest bytes that streams in, waits, or leaves."""
        leaving = {s.dtype for d in self.drafts for s in d.sinks if s.kind == "staged"}
        return max(map(columns_of, {self.dtype, *(s.dtype for s in self.streams.values()), *leaving}))

    def chunk_of(self, tile: str) -> int:
        """Columns of ``tile`` that there are at once: all, or those of a turn of its loop."""
        layer = self.layers.get(tile)
        if layer is None:
            return self.features[tile]
        return next(loop.tile for loop in self.stage.loops if loop.axis == layer.axis)

    # -- names

    def parts(self, name: str) -> list[str]:
        """A tile, or the tiles that a concatenation is made of, however nested."""
        return [p for part in self.cats[name] for p in self.parts(part)] if name in self.cats else [name]

    def usable_from(self, name: str) -> int:
        """First step whose epilogue may read the tile; -1 for what needs no step."""
        if name in self.views:
            return self.usable_from(self.views[name][0]) + (0 if self.views[name][0] in self.cats else 1)
        if name in self.cats or name in self.own:
            return self.step_of[name] + 1
        return self.step_of.get(name, -1)

    def new_step(self, features: int, op: TileOp, layer: LoopedLayer | None = None) -> int:
        """Begin a step of so many columns for ``op``, of ``layer`` chunk by chunk; its number.

        Raises:
            VerifyError: it is wider than a fragment.
        """
        dim = self.stage.placement.dim
        if layer is None and features > ACC_LIMIT[dim]:
            raise VerifyError(
                f"{op.kind} at {op.source or self.stage.name} makes {features} features; a fragment under "
                f"Shard({dim}) holds {ACC_LIMIT[dim]}",
                "use Shard(1) (up to 512), split the layer over several stages, or leave it to the fallback",
            )
        self.drafts.append(Draft(features, layer))
        return len(self.drafts) - 1

    # -- making values available

    def as_tile(self, name: str, op: TileOp, dtype: str = "", joins: bool = False) -> str:
        """A row value, a stream that must be copied, or a function of streams alone, as a step's result.

        Args:
            joins: functions of streams are copied by one step as far as they can be, which reads the streams once.
        """
        own = self.tiles[name].dtype
        key = (name, dtype or own)
        if key not in self.copies:
            copy = self._copy(key, "tile" if key[1] == own else dtype, key[1])
            joins = joins and name in self.floating
            last = len(self.drafts) - 1
            if joins and self.joined == last and self.drafts[last].features == copy.features:
                step = last
            else:
                step = self.new_step(copy.features, op)
            self.drafts[step].nodes.append(TileOp("add", copy, (name,), (), (("scalar", 0.0),), op.source))
            self.joined = step if joins else self.joined
            self.step_of[copy.name] = step
        return self.copies[key]

    def _copy(self, key: tuple[str, str], ending: str, dtype: str) -> Tile:
        """A new tile, the copy of that which ``key`` names."""
        copy = Tile.of(f"{key[0]}.{ending}", self.features[key[0]], dtype)
        self.tiles[copy.name], self.features[copy.name], self.copies[key] = copy, copy.features, copy.name
        return copy

    def _made(self, name: str, op: TileOp) -> str:
        """The tile as some step has it whole: its copy, where none makes it as it stands."""
        others = (self.streams, self.rows, self.views, self.cats, self.floating, self.own)
        return self.as_tile(name, op) if any(name in group for group in others) else name

    def made_by(self, part: str) -> int:
        """The step that makes a part of a concatenation, or its copy."""
        return self.step_of[self.copies.get((part, self.tiles[part].dtype), part)]

    def gather(self, name: str, op: TileOp) -> None:
        """Write a concatenation into one shared buffer, each part by the step that makes it."""
        if name in self.step_of:
            return
        column, last = 0, -1
        for part in self.parts(name):
            source = self._made(part, op)
            self.drafts[self.step_of[source]].sinks.append(Sink(source, "shared", name, column))
            last = max(last, self.step_of[source])
            column += self.features[part]
        self.step_of[name] = last
        self.shared.add(name)

    @property
    def packed(self) -> frozenset[str]:
        """Operands that can be in registers alone: what every block of a product reads, rows that lanes load."""
        return frozenset(name for (_, how), name in self.copies.items() if how == "packed") | self.own

    @cached_property
    def loops(self) -> tuple[ColumnLoop, ...]:
        """The loops over columns, as steps; known when the walk is over.

        Raises:
            VerifyError: a step that is of no loop lies inside of one.
        """
        loops = []
        if self.layers and self.blocks:
            raise VerifyError(
                f"stage {self.stage.name!r} takes hidden layers by chunks and makes tiles by blocks",
                "use one of the two",
            )
        for layer in dict.fromkeys(self.layers.values()):
            steps = [k for k, draft in enumerate(self.drafts) if draft.layer is layer]
            sums = self.step_of[layer.reader.made.name]
            if [*steps, sums] != list(range(steps[0], sums + 1)):
                raise VerifyError(
                    f"the hidden layer at {layer.ops[0].source or self.stage.name} is taken by chunks, and other steps"
                    " lie between it and the linear that reads it",
                    "order its ops directly before that linear (plan.passes.forms.chunk_hidden does)",
                )
            loops.append(ColumnLoop(steps[0], steps[-1], sums, layer.features, self.chunk_of(layer.tile)))
        return tuple(loops)

    # -- the walk over the ops

    def run(self) -> Walk:
        """Walk over the ops, in order, then over what leaves the stage."""
        for name in self.stage.taken():
            self.streams[name] = Stream(name, self.features[name], self.tiles[name].dtype, queue=name)
        for op in self.ops:
            getattr(self, f"_{op.kind}", self._elementwise)(op)
        self._sinks()
        return self

    def _load(self, op: TileOp) -> None:
        dtype, tap = self.pipeline.tensor(op.params[0]).dtype, Tap.of(op)
        if tap is not None:
            check_tap(op, tap, self.pipeline)
        if op.attr("own"):
            check_own(op, self.stage, dtype, self.dtype)
            self.own.add(op.made.name)
            self.step_of[op.made.name] = len(self.drafts)
            self.drafts.append(Draft(op.made.features, nodes=[op]))
            self.drafts[-1].sinks.append(Sink(op.made.name, "registers", op.made.name))
            return
        self.streams[op.made.name] = Stream(
            op.made.name, op.made.features, dtype, tensor=op.params[0], index=op.index, tap=tap
        )

    def _cat(self, op: TileOp) -> None:
        self.cats[op.made.name] = op.ins

    def _slice(self, op: TileOp) -> None:
        """A slice of a stream is a stream of fewer columns; one of a tile is a view of it in shared memory."""
        name, start, base = op.made.name, int(op.attr("start", 0) or 0), op.ins[0]
        if base in self.own:
            base = self.as_tile(base, op)
        if (
            base in self.streams
            and (self.streams[base].start + start) * DTYPE_BYTES[self.streams[base].dtype] % 16
            and (self.streams[base].queue or self.streams[base].index or self.streams[base].tap)
        ):
            # Copies start on 16 bytes; what does not is cut out of a copy in shared memory.
            base = self.as_tile(base, op)
        if base in self.streams:
            s = self.streams[base]
            self.streams[name] = replace(s, tile=name, features=op.made.features, start=s.start + start)
            return
        if base in self.views:
            base, more = self.views[base]
            start += more
        if base in self.cats:
            self.gather(base, op)
        else:
            base = self._made(base, op)
            self.shared.add(base)
        self.views[name] = (base, start)

    def _linear(self, op: TileOp) -> None:
        layer = self.layers.get(op.made.name)
        for other in layer.linears if layer is not None else ():  # what they read comes before the loop
            self._operands(other, layer)
        segments = self._operands(op, layer)
        step = self.new_step(op.made.features, op, layer)
        self.drafts[step].linear = TileOp("linear", op.made, tuple(segments), op.params, op.attrs, op.source)
        self.step_of[op.made.name] = step

    def _operands(self, op: TileOp, layer: LoopedLayer | None) -> list[str]:
        """The parts of a product's left operand, copied where a product, or every turn of a loop, cannot take them."""
        segments = []
        again = op.attr(START) is not None and self.features[op.ins[0]] <= MOST_PACKED  # by every block
        for part in self._operand_parts(op.ins[0]):
            if part in self.blocks or (again and part in self.streams and self.stored(part) == self.dtype):
                part = self._packed(part, op)
            elif layer is not None and part in self.streams:
                part = self.as_tile(part, op, self.dtype)
            elif part in self.rows or part in self.floating or self.stored(part) != self.dtype:
                part = self.as_tile(part, op, self.dtype, joins=True)
            elif part in self.views:
                base, start = self.views[part]
                columns = columns_of(self.dtype)
                if start % columns or (
                    self.features[part] % columns and start + self.features[part] != self.features[base]
                ):
                    part = self.as_tile(part, op)
            segments.append(part)
        return segments

    def _operand_parts(self, name: str) -> list[str]:
        if name in self.blocks or name not in self.cats:
            return [name]
        return [p for part in self.cats[name] for p in self._operand_parts(part)]

    def _packed(self, name: str, op: TileOp) -> str:
        """A stream, or a tile that was made by blocks, as packed registers, which every block of a product reads.

        The last block goes there directly: the product before is done with its own operand then.
        """
        key = (name, "packed")
        if key not in self.copies:
            sources = self.blocks.get(name, (name,))
            odd = next((s for s in sources if self.stored(s) != self.dtype), None)
            if odd is not None:
                raise VerifyError(
                    f"{op.kind} at {op.source or name} multiplies {self.tiles[odd].dtype} that was made by blocks",
                    f"cast it to {self.dtype}",
                )
            copy = self._copy(key, "packed", self.dtype)
            if name in self.blocks:
                *sources, last = sources
                column = sum(self.features[s] for s in sources)
                self.step_of[copy.name] = self.step_of[last]
                self.drafts[self.step_of[last]].sinks.append(Sink(last, "registers", copy.name, column))
            if sources:
                self.drafts.append(Draft(copy.features))
                self.drafts[-1].nodes.append(TileOp("copy", copy, tuple(sources), (), (), op.source))
                self.drafts[-1].sinks.append(Sink(copy.name, "registers", copy.name))
                self.step_of.setdefault(copy.name, len(self.drafts) - 1)
        return self.copies[key]

    def _max_rows(self, op: TileOp) -> None:
        self.maxima[op.made.name] = op

    def _store(self, op: TileOp) -> None:
        pass  # sinks are made when every tile has its step

    def _elementwise(self, op: TileOp) -> None:
        """Join the step that makes the last of the operands, where widths agree; else begin one. What has no operand of
        any step floats."""
        name = op.made.name
        for i in op.ins:
            if i in self.maxima:
                raise VerifyError(f"{op.kind} at {op.source or i} takes maxima over rows", "store them")
            if i in self.cats:
                self.gather(i, op)
        reduces = op.kind in ("sum", "max")
        all_rows = bool(op.ins) and all(i in self.rows for i in op.ins) and not op.params
        width = 1 if all_rows else max(self.features[i] for i in (*op.ins, name) if i not in self.rows)
        first = max((self.usable_from(i) for i in op.ins), default=-1)
        if first < 0:
            if not reduces:
                self.floating[name] = op
                return
            first = self.new_step(width, op)
        elif first >= len(self.drafts) or (not all_rows and self.drafts[first].features != width):
            first = self.new_step(width, op)
        if reduces or all_rows:
            self.rows.add(name)
        self.drafts[first].nodes.append(op)
        self.step_of[name] = first

    # -- stores and queues

    def _sinks(self) -> None:
        pushed = [q for q in self.pipeline.queues if q.producer == self.stage.name]
        wanted = [(op.ins[0], op.params[0], op) for op in self.stage.ops if op.kind == "store"]
        wanted += [(q.tile, "", TileOp("store", None, (q.tile,), (), (), q.source)) for q in pushed]
        for tile, target, op in wanted:
            if tile in self.maxima:
                self._store_maxima(self.maxima[tile], target)
                continue
            parts = self.parts(tile) if target else [tile]
            if tile in self.cats and not target:
                self.gather(tile, op)
                parts = [tile]
            column = first_column(op)
            for part in parts:
                source = self._made(part, op)
                if op.receivers:
                    self._to_nodes(source, parts, op)
                    continue
                whole = tile in self.blocks and all(self.features[p] % 64 == 0 for p in parts[:-1])
                kind = "staged" if self._can_stage(target, 1 if whole else len(parts)) else "direct"
                dtype = self.pipeline.tensor(target).dtype if target else self.tiles[tile].dtype
                # A queue is known by its tile's name, also where a copy is what is pushed.
                sink = Sink(source, kind, target or f"queue:{tile}", column, dtype)
                self.drafts[self.step_of[source]].sinks.append(sink)
                column += self.features[part]

    def _store_maxima(self, op: TileOp, target: str) -> None:
        """Maxima over rows go from the epilogue that makes the rows to memory."""
        column = 0
        for part in self.parts(op.ins[0]):
            part = self._made(part, op)
            if not target or self.features[part] % 64 or self.tiles[part].dtype == "f32" or self.pass_columns != 64:
                raise VerifyError(
                    f"{op.kind} at {op.source or self.stage.name} takes {self.features[part]} columns of"
                    f" {self.tiles[part].dtype}, by {self.pass_columns}",
                    "store maxima of bf16 or f16, of multiples of 64 columns",
                )
            self.drafts[self.step_of[part]].sinks.append(Sink(part, "maxima", target, column, op.made.dtype))
            column += self.features[part]

    def _to_nodes(self, source: str, parts: list[str], op: TileOp) -> None:
        """Rows are summed to nodes by the epilogue that makes them."""
        if len(parts) > 1:
            raise VerifyError(
                f"{op.kind} at {op.source or op.params[0]} sums a concatenation to nodes", "sum each part"
            )
        out = self.pipeline.tensor(op.params[0])
        self.drafts[self.step_of[source]].sinks.append(Sink(source, "nodes", out.name, 0, out.dtype))

    def _can_stage(self, target: str, parts: int) -> bool:
        """Bulk stores need rows of a multiple of 16 bytes."""
        if not target:
            return True
        tensor = self.pipeline.tensor(target)
        return parts == 1 and tensor.features * DTYPE_BYTES[tensor.dtype] % 16 == 0

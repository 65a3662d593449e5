"""Who advances when: workers, one a stage and replica, that fire when their tiles and the room are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Literal

import torch
from torch.nn import functional

from tilestream.errors import InputError
from tilestream.ir.dtypes import ELEMENT_DTYPES
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, TileOp, Transport
from tilestream.ir.plain import by_rows
from tilestream.ir.shapes import check_shapes
from tilestream.ir.taps import rows_given
from tilestream.ir.verify import verify
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import ARITHMETIC, Arithmetic
from tilestream.reference.ring import Slots, Wait, take_turns
from tilestream.reference.rows import Rows

Observe = Callable[[str, int, torch.Tensor], None]


def run(
    pipeline: Pipeline,
    tensors: Mapping[str, torch.Tensor],
    *,
    precision: Literal["working", "float64"] = "working",
    observe: Observe | None = None,
) -> dict[str, torch.Tensor]:
    """Execute ``pipeline`` on the CPU, launch after launch, and return every output.

    Pipelines with other axes than rows run on a machine with a private memory a worker (``mesh_machine``).

    In ``working`` precision ops compute in fp32, and a value is rounded to its tile's dtype as the operand of a
    linear, on crossing a queue and at a cast, and to its tensor's dtype at a store. In ``float64`` nothing is
    rounded and outputs are float64: the oracle.

    A worker fires on a whole step of ``Stage.tiles_per_step`` tiles, and only when all the tiles that it takes are
    queued and all that it makes have room. It holds no tile between steps, so it needs at least as much queue as
    the GPU does: what completes here completes there.

    Args:
        tensors: every input, ``[rows, features]``, and every parameter, of its declared shape and dtype (or
            float64 in ``float64`` precision), on the CPU.
        observe: called with tile name, tile index and value (at most a tile's rows, before rounding) of each
            tile that a stage makes. Rows beyond the end are left out.

    Returns:
        Output name to ``[rows, features]``.

    Raises:
        InputError: ``tensors`` does not fit the pipeline.
        VerifyError: the shapes of the ops do not agree.
        PipelineDeadlock: no worker can go on; says which, at which tile and queue.
    """
    arithmetic = ARITHMETIC[precision]
    if not by_rows(pipeline):
        verify(pipeline)
        return run_meshes(pipeline, tensors, arithmetic)
    check_shapes(pipeline)
    rows = check_inputs(pipeline, tensors, arithmetic)
    memory = dict(tensors)
    for launch in cut_at_dram(pipeline):
        memory |= _Launch(launch, memory, rows, arithmetic, observe, tensors.keys()).run()
    return {t.name: memory[t.name] for t in pipeline.by_role(Role.OUTPUT)}


class _Launch:
    """One launch: its tensors, its rings, and its workers until all have done their tiles. ``given``: tensors that no
    launch before it has made."""

    def __init__(
        self,
        pipeline: Pipeline,
        memory: Mapping[str, torch.Tensor],
        rows: int,
        arithmetic: Arithmetic,
        observe: Observe | None,
        given: Collection[str],
    ) -> None:
        self.pipeline = pipeline
        self.rows = rows
        self.tile_rows = pipeline.tile_rows
        self.arithmetic = arithmetic
        self.observe, self.given = observe, given
        self.described = pipeline.tiles()
        self.tensors = Rows(pipeline, memory, rows, arithmetic)
        self.rings = [Slots(q) for q in pipeline.queues if q.transport is not Transport.DRAM]
        # Every stage must see whole steps, or one of two tiles a step would wait for a tile that nobody makes.
        step = max((s.tiles_per_step for s in pipeline.stages), default=1)
        self.tiles = -(-rows // (pipeline.tile_rows * step)) * step

    def run(self) -> dict[str, torch.Tensor]:
        workers = {}
        for stage in self.pipeline.stages:
            for replica in range(stage.replicas):
                at = f" ({stage.source})" if stage.source else ""
                workers[f"stage {stage.name!r} replica {replica}{at}"] = self._work(stage, replica)
        take_turns(
            self.pipeline.name,
            workers,
            "make each full queue hold at least one step of every stage at its ends, and remove cycles; "
            "tilestream.ir.verify names the rule",
        )
        return self.tensors.results()

    def _work(self, stage: Stage, replica: int) -> Iterator[Wait | None]:
        """One replica of a stage; it does every ``replicas``-th step, in order."""
        takes = [r for r in self.rings if stage.name in r.queue.consumers]
        makes = [r for r in self.rings if stage.name == r.queue.producer]
        per_step = stage.tiles_per_step
        for first in range(replica * per_step, self.tiles, per_step * stage.replicas):
            step = range(first, first + per_step)
            while wait := _blocked(stage, step, takes, makes):
                yield wait
            for t in step:
                values = {r.queue.tile: self.arithmetic.widen(r.take(t, stage.name)) for r in takes}
                for op in stage.ops:
                    self._apply(op, values, t)
                for ring in makes:
                    tile = self.described[ring.queue.tile]
                    ring.push(t, self.arithmetic.stored(values[tile.name], tile.dtype))
            yield None

    def _apply(self, op: TileOp, values: dict[str, torch.Tensor], t: int) -> None:
        rows = slice(t * self.tile_rows, min((t + 1) * self.tile_rows, self.rows))
        count = max(0, rows.stop - rows.start)
        if op.out is None:
            if count:
                self.tensors.store(op, values[op.ins[0]][:count], rows)
            return
        value = self._load(op, rows, count) if op.kind == "load" else self.tensors.evaluate(op, values)
        values[op.out.name] = value
        # A tile that crossed DRAM was observed where it was made; its load is no new value.
        is_new = op.kind != "load" or op.params[0] in self.given
        if self.observe is not None and count and is_new:
            self.observe(op.out.name, t, value[:count])

    def _load(self, op: TileOp, rows: slice, count: int) -> torch.Tensor:
        """A whole tile; 0 beyond the last row."""
        if not count:
            return torch.zeros(self.tile_rows, op.made.features, dtype=self.arithmetic.dtype)
        return functional.pad(self.tensors.load(op, rows), (0, 0, 0, self.tile_rows - count))


def _blocked(stage: Stage, step: range, takes: list[Slots], makes: list[Slots]) -> Wait | None:
    """What a step waits for: a tile, or room for one."""
    at = f"at tile {step[0]} waits for"
    missing = (Wait(f"{at} tile {t}", r) for r in takes for t in step if not r.holds(t, stage.name))
    full = (Wait(f"{at} room for tile {t}", r) for r in makes for t in step if not r.has_room(t))
    return next(chain(missing, full), None)


def check_inputs(pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], arithmetic: Arithmetic) -> int:
    """The number of rows, which all inputs share.

    Raises:
        InputError: a tensor is missing, is not of the pipeline, or has the wrong shape, dtype or device; or an index
            names a row that there is not.
    """
    wanted = {t.name: t for t in pipeline.tensors if t.role is not Role.OUTPUT}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise InputError(
            f"pipeline {pipeline.name!r} was not given {', '.join(map(repr, missing))}",
            f"pass every input and parameter: {', '.join(wanted)}",
        )
    extra = [name for name in tensors if name not in wanted]
    if extra:
        raise InputError(
            f"pipeline {pipeline.name!r} does not take {', '.join(map(repr, extra))}",
            f"pass its inputs and parameters only: {', '.join(wanted)}",
        )
    for name, want in wanted.items():
        _check_tensor(want, tensors[name], arithmetic)
    for op in (op for stage in pipeline.stages for op in stage.ops if op.index):
        _check_index(op, tensors[op.params[0]], tensors[op.index])
    return rows_given(pipeline, lambda name: tensors[name].shape[0])


def _check_tensor(want: Tensor, got: torch.Tensor, arithmetic: Arithmetic) -> None:
    what = f"{want.role.value} {want.name!r}"
    if not isinstance(got, torch.Tensor):
        raise InputError(f"{what} is a {type(got).__name__}", "give a torch.Tensor")
    shape = tuple(got.shape)
    sizes = tuple(a.size for a in want.axes)
    if len(shape) != len(sizes) or any(n not in (None, m) for n, m in zip(sizes, shape, strict=True)):
        words = ["rows" if n is None else str(n) for n in sizes]
        expected = f"[{', '.join(words)}]"
        raise InputError(f"{what} has shape {list(shape)}, the pipeline takes {expected}", "reshape it")
    dtype = ELEMENT_DTYPES[want.dtype]
    if got.dtype != dtype and not (got.dtype == arithmetic.dtype and not arithmetic.rounds):
        raise InputError(f"{what} is {got.dtype}, the pipeline takes {dtype}", f"convert it with .to({dtype})")
    if got.device.type != "cpu":
        raise InputError(f"{what} is on {got.device}, the reference machine runs on the CPU", "move it with .cpu()")


def _check_index(op: TileOp, table: torch.Tensor, index: torch.Tensor) -> None:
    """An index names rows of its table; those below zero count from its end, as in torch."""
    rows = len(table)
    outside = (index < -rows) | (index >= rows)
    if bool(outside.any()):
        at = int(outside.nonzero()[0, 0])
        raise InputError(
            f"index {op.index!r} is {int(index[at])} where table {op.params[0]!r} has {rows} rows"
            f" ({op.source or 'no source line'})",
            f"give indices from {-rows} to {rows - 1}",
        )

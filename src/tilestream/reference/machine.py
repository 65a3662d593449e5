"""Who advances when: workers, one a stage and replica, that fire when their tiles and the room are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch.nn import functional

from tilestream.errors import PipelineDeadlock
from tilestream.ir.columns import first_column
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tile, TileOp, Transport
from tilestream.ir.plain import by_rows
from tilestream.ir.shapes import check_shapes
from tilestream.ir.taps import Tap
from tilestream.ir.verify import verify
from tilestream.reference.inputs import check_inputs
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import ARITHMETIC, Arithmetic, evaluate, pixels, take
from tilestream.reference.ring import Ring

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
        watch = observe and _skip_reloads(observe, {t.name for t in pipeline.tensors}, launch)
        memory |= _Launch(launch, memory, rows, arithmetic, watch).run()
    return {t.name: memory[t.name] for t in pipeline.by_role(Role.OUTPUT)}


def _skip_reloads(observe: Observe, known: set[str], launch: Pipeline) -> Observe:
    """A tile that crossed DRAM was observed where it was made; its load by a later launch is no new value."""
    reloaded = {
        op.out.name
        for stage in launch.stages
        for op in stage.ops
        if op.kind == "load" and op.out is not None and op.params[0] not in known
    }

    def observe_once(tile: str, index: int, value: torch.Tensor) -> None:
        if tile not in reloaded:
            observe(tile, index, value)

    return observe_once


class _Launch:
    """One launch: its tensors, its rings, and its workers until all have done their tiles."""

    def __init__(
        self,
        pipeline: Pipeline,
        memory: Mapping[str, torch.Tensor],
        rows: int,
        arithmetic: Arithmetic,
        observe: Observe | None,
    ) -> None:
        self.pipeline = pipeline
        self.rows = rows
        self.tile_rows = pipeline.tile_rows
        self.arithmetic = arithmetic
        self.observe = observe
        self.described = pipeline.tiles()
        self.inputs = {t.name: memory[t.name] for t in pipeline.by_role(Role.INPUT)}
        self.params = {t.name: arithmetic.widen(memory[t.name]) for t in pipeline.by_role(Role.PARAMETER)}
        self.outputs = {
            t.name: arithmetic.stored(torch.empty(rows, t.features, dtype=arithmetic.dtype), t.dtype)
            for t in pipeline.by_role(Role.OUTPUT)
        }
        self.rings = [Ring(q) for q in pipeline.queues if q.transport is not Transport.DRAM]
        # Every stage must see whole steps, or one of two tiles a step would wait for a tile that nobody makes.
        step = max((s.tiles_per_step for s in pipeline.stages), default=1)
        self.tiles = -(-rows // (pipeline.tile_rows * step)) * step

    def run(self) -> dict[str, torch.Tensor]:
        workers = [_Worker(stage, r, self.rings) for stage in self.pipeline.stages for r in range(stage.replicas)]
        fired = 0
        while left := [w for w in workers if w.first < self.tiles]:
            before = fired
            for worker in left:
                if worker.blocked() is None:
                    self._fire(worker)
                    fired += 1
            if fired == before:
                raise self._deadlock(left, fired)
        return self.outputs

    def _fire(self, worker: _Worker) -> None:
        for t in worker.step():
            values = {ring.queue.tile: self.arithmetic.widen(ring.take(t, worker.stage.name)) for ring in worker.takes}
            for op in worker.stage.ops:
                self._apply(op, values, t)
            for ring in worker.makes:
                tile = self.described[ring.queue.tile]
                ring.push(t, self.arithmetic.stored(values[tile.name], tile.dtype))
        worker.advance()

    def _apply(self, op: TileOp, values: dict[str, torch.Tensor], t: int) -> None:
        start, stop = t * self.tile_rows, min((t + 1) * self.tile_rows, self.rows)
        if op.out is None:
            if start < stop:
                tensor = self.outputs[op.params[0]]
                value, first = values[op.ins[0]][: stop - start], first_column(op)
                tensor[start:stop, first : first + value.shape[1]] = value.to(tensor.dtype)
            return
        if op.kind == "load":
            value = self._load(op, op.out, start, stop)
        else:
            tiles = [self.described[name] for name in op.ins]
            params = [self.params[name] for name in op.params]
            value = evaluate(op, [values[name] for name in op.ins], tiles, params, self.arithmetic)
        values[op.out.name] = value
        if self.observe is not None and start < stop:
            self.observe(op.out.name, t, value[: stop - start])

    def _load(self, op: TileOp, tile: Tile, start: int, stop: int) -> torch.Tensor:
        if start >= stop:
            return torch.zeros(self.tile_rows, tile.features, dtype=self.arithmetic.dtype)
        name = op.params[0]
        tap = Tap.of(op)
        if tap is not None:
            value = pixels(self.params[name], tap, torch.arange(start, stop))
        elif op.index:
            value = take(self.params[name], self.inputs[op.index][start:stop], op)
        else:
            value = self.arithmetic.widen(self.inputs[name][start:stop])
        short = self.tile_rows - (stop - start)
        return functional.pad(value, (0, 0, 0, short)) if short else value

    def _deadlock(self, blocked: list[_Worker], fired: int) -> PipelineDeadlock:
        waits = ((w, w.blocked()) for w in blocked)
        reasons = "; ".join(
            f"{w.name} at tile {w.first} waits for {wait[0]} {wait[1]} in the {wait[2].describe()}"
            for w, wait in waits
            if wait
        )
        return PipelineDeadlock(
            f"no stage of pipeline {self.pipeline.name!r} can go on after {fired} steps: {reasons}",
            "make each full queue hold at least one step of every stage at its ends, and remove cycles; "
            "tilestream.ir.verify names the rule",
        )


class _Worker:
    """One replica of a stage; it does every ``replicas``-th step, in order."""

    def __init__(self, stage: Stage, replica: int, rings: list[Ring]) -> None:
        self.stage = stage
        self.name = f"stage {stage.name!r} replica {replica}" + (f" ({stage.source})" if stage.source else "")
        self.takes = [r for r in rings if stage.name in r.queue.consumers]
        self.makes = [r for r in rings if stage.name == r.queue.producer]
        self.first = replica * stage.tiles_per_step

    def step(self) -> range:
        return range(self.first, self.first + self.stage.tiles_per_step)

    def advance(self) -> None:
        self.first += self.stage.tiles_per_step * self.stage.replicas

    def blocked(self) -> tuple[str, int, Ring] | None:
        """What the next step waits for: a tile or room for it, its index, and the queue."""
        for ring in self.takes:
            for t in self.step():
                if not ring.holds(t, self.stage.name):
                    return "tile", t, ring
        for ring in self.makes:
            for t in self.step():
                if not ring.has_room(t):
                    return "room for tile", t, ring
        return None

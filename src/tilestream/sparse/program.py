"""A compiled sparse program: regions and data movement, run on the specification or on the compiled engine."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from tilestream.errors import SparseError
from tilestream.sparse.choice import Choice, Fusion, choose
from tilestream.sparse.eager import Eager
from tilestream.sparse.einsum import Declared, EinsumProgram, Move, parse
from tilestream.sparse.lowering.build import plan
from tilestream.sparse.lowering.tiles import Edge, TileFormat, to_tiles
from tilestream.sparse.moves import bare_fibers, perform
from tilestream.sparse.outputs import OutputView, output
from tilestream.sparse.region import Region, Source
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format, Level, SparseTensor, from_torch, plain, prune, repack
from tilestream.sparse.stream.result import Result

DEEPEST = 1 << 24
"""Slots of a channel, which are memory here, at most."""
Engine = Literal["fast", "spec"]
Value = torch.Tensor | SparseTensor


@dataclass(frozen=True)
class ProgramResult:
    """What a run gave.

    Attributes:
        outputs: float64 tensors in the order of the program's outputs: strided, or COO beyond ``outputs.LARGEST``
            elements.
        tensors: every result by name, as stored.
        cycles: the sum over regions, which run one after the other.
        regions: each region's own result, by name.
    """

    outputs: tuple[torch.Tensor, ...]
    tensors: Mapping[str, SparseTensor] = field(repr=False)
    cycles: int
    regions: Mapping[str, Result] = field(repr=False)

    @property
    def output(self) -> torch.Tensor:
        """The only output; the first of several."""
        return self.outputs[0]

    @property
    def flops(self) -> int:
        return sum(x.flops for x in self.regions.values())

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.regions.values())


class Program:
    """Compiled regions of an einsum program under a schedule.

    ``constants`` are the tensors that a module owns (its parameters); ``names`` the inputs that ``run`` takes, in
    order. ``fixed`` are inputs whose values were compiled in; where there are some, ``given`` has the names of all
    inputs in order, and ``run`` takes either these or ``names``. ``pruned`` inputs are masks: what is stored as 0 does
    not count. ``unbroken`` are masks (tensor, dimension) that have no fiber without an entry. ``owned``: the constants
    as the module has them, where they can change.
    """

    def __init__(
        self,
        einsums: EinsumProgram,
        schedule: Schedule,
        names: Sequence[str],
        constants: Mapping[str, SparseTensor] | None = None,
        inputs: Sequence[SparseTensor] = (),
        outputs: Sequence[OutputView] = (),
        fixed: Mapping[str, torch.Tensor] | None = None,
        given: Sequence[str] = (),
        pruned: Collection[str] = (),
        unbroken: Collection[tuple[str, int]] = (),
        owned: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.einsums, self.asked = einsums, schedule
        self.names = tuple(name for name in names if name in einsums.inputs)
        self.constants = dict(constants or {})
        self.inputs = tuple(inputs)
        self.fixed, self.pruned = dict(fixed or {}), frozenset(pruned)
        self.unbroken = tuple(unbroken)
        self.bits = 53
        """Significant bits of the narrowest floats that results are rounded to."""
        self.owned = dict(owned or {})
        self.module: torch.nn.Module | None = None
        """What it was compiled from, if it was."""
        self.given = tuple(name for name in given if name in self.names or name in self.fixed)
        self.outputs = tuple(outputs) or tuple(
            OutputView(name, tuple(range(len(einsums.shapes[name]))), einsums.shapes[name]) for name in einsums.outputs
        )
        self.choice: Choice | None = None
        """What ``fuse="auto"`` chose, once something asked for the regions."""
        self._planned = None if schedule.fuse == "auto" else (schedule, plan(einsums, schedule))
        self._plans: dict[Fusion, list[Region | Move]] = {}
        self._views: dict[tuple[str, str, Format], SparseTensor] = {}
        if self._planned is None and not schedule.order and not schedule.parallel:
            self._plan("none")  # what cannot be compiled says so now
        else:
            self._chosen()

    @property
    def schedule(self) -> Schedule:
        """The schedule, with what was chosen for ``fuse="auto"``."""
        return self._chosen()[0]

    @property
    def steps(self) -> list[Region | Move]:
        """Regions and moves in an order in which they can run."""
        return self._chosen()[1]

    def _chosen(self) -> tuple[Schedule, list[Region | Move]]:
        if self._planned is None:
            known = len(self.inputs) == len(self.names) and len(self.einsums.statements) > 1
            choice = choose(self.einsums, self._expected) if known else None
            self._planned = self._plan(choice.fuse if choice else "none")
            self.choice = choice
        return self._planned

    def _plan(self, fuse: Fusion) -> tuple[Schedule, list[Region | Move]]:
        schedule = replace(self.asked, fuse=fuse)
        if fuse not in self._plans:
            self._plans[fuse] = plan(self.einsums, schedule)
        return schedule, self._plans[fuse]

    def _expected(self, fuse: Fusion) -> float:
        """Cycles that are expected with a fusion."""
        expected = importlib.import_module("tilestream.sparse.expected")
        return expected.estimate_program(self.planned(self.einsums, *self._plan(fuse))).cycles

    def planned(self, einsums: EinsumProgram, schedule: Schedule, steps: list[Region | Move]) -> Program:
        """The program as another one of the same inputs and outputs, cut into other regions."""
        made = copy.copy(self)
        made.einsums, made._planned, made._views = einsums, (schedule, steps), {}
        return made

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(step for step in self.steps if isinstance(step, Region))

    @property
    def eager(self) -> tuple[Eager, ...]:
        """Operators that PyTorch runs between regions, dense; no cycles are counted for them."""
        return tuple(dict.fromkeys(step.eager for step in self.steps if isinstance(step, Move) and step.eager))

    def region(self, name: str) -> Region:
        for one in self.regions:
            if one.name == name:
                return one
        raise SparseError(f"no region {name!r}", f"use one of {', '.join(r.name for r in self.regions)}")

    def tables(self) -> str:
        """The fusion table of every region, as the paper draws it."""
        return "\n\n".join(f"{region.name}\n{region.table}" for region in self.regions)

    def __str__(self) -> str:
        chosen = [repr(self.schedule), *([str(self.choice)] if self.choice else [])]
        return "\n".join([*chosen, *(str(step) for step in self.steps)])

    def feeds(self, *inputs: Value) -> Iterator[tuple[Region, dict[str, SparseTensor]]]:
        """Regions that read only inputs and constants, with the tensors that their graphs need."""
        have = self.bind(*inputs)
        for region in self.regions:
            if all(not isinstance(source, str) or source in have for source, _ in region.inputs.values()):
                yield region, self._feed(region, have)

    def run(
        self,
        *inputs: Value,
        engine: Engine = "fast",
        memory: Any = None,
        depth: int | Mapping[str, int] | None = None,
        timing: Any = None,
        trace: bool = False,
        values: bool = True,
        observe: Callable[[Region, Result], None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> ProgramResult:
        """Run all regions, one after the other.

        Args:
            inputs: as given to ``compile``, in its order; none: those that it was compiled with.
            engine: ``"fast"``: the compiled engine. ``"spec"``: the specification, token by token, slow.
            memory: a ``sparse.memory.Memory``, for the fast engine; default none.
            depth: slots of every channel, or by stream; None for no bound.
            timing: a ``sparse.timing.Timing``; default the reference code's.
            trace: keep every stream.
            values: False: the fast engine leaves out the arithmetic; cycles, counts and structures stay, values are 0.
            observe: called with each region and its result as soon as it has run.
            progress: called with a line every few seconds of the fast engine; what it raises ends the run.

        Raises:
            SparseError: inputs that are not those of the program, or an engine that is neither of the two.
            StreamDeadlock: channels that are too shallow.
        """
        if engine not in ("fast", "spec"):
            raise SparseError(f"engine {engine!r}", 'use "fast" or "spec"')
        if any(n > DEEPEST for n in (depth.values() if isinstance(depth, Mapping) else [depth or 0])):
            raise SparseError(f"channels of more than {DEEPEST:,} slots", "use None for no bound")
        module = importlib.import_module(
            "tilestream.sparse.engine" if engine == "fast" else "tilestream.sparse.run_spec"
        )
        options: dict[str, Any] = {"depth": depth, "trace": trace}
        options |= {"timing": timing} if timing is not None else {}
        options |= {"values": False} if not values and engine == "fast" else {}
        options |= {"memory": memory} if memory is not None and engine == "fast" else {}
        options |= {"progress": progress} if progress is not None and engine == "fast" else {}
        have = self.bind(*inputs)
        results: dict[str, Result] = {}
        fills = {name: fill for region in self.regions for name, fill in region.fills.items()}
        for step in self.steps:
            if isinstance(step, Move):
                have[step.name] = perform(
                    step, [have[x] for x in step.operands], [fills.get(x, 0.0) for x in step.operands]
                )
                if step.eager is None and fills.get(step.operands[0]):
                    fills[step.name] = fills[step.operands[0]]
                continue
            result = module.run(step.graph, self._feed(step, have), shapes=step.outputs, **options)
            results[step.name] = result
            have |= step.results(result.outputs, self.einsums.shapes)
            if observe is not None:
                observe(step, result)
        made = {name: tensor for name, tensor in have.items() if name not in self.constants}
        outputs = tuple(output(view, have[view.tensor], fills.get(view.tensor, 0.0)) for view in self.outputs)
        return ProgramResult(outputs, made, sum(x.cycles for x in results.values()), results)

    def stream(self, region: Region, have: Mapping[str, SparseTensor]) -> dict[str, SparseTensor]:
        """The results of one region by the compiled engine."""
        engine = importlib.import_module("tilestream.sparse.engine")
        made = engine.run(region.graph, self._feed(region, have), shapes=region.outputs)
        return region.results(made.outputs, self.einsums.shapes)

    def bind(self, *inputs: Value) -> dict[str, SparseTensor]:
        """Inputs and constants by name, as the program stores them; no inputs: those that it was compiled with."""
        given = self.free(tuple(plain(x) for x in inputs)) or self.inputs
        if len(given) != len(self.names):
            raise SparseError(
                f"{len(given)} inputs for {len(self.names)} ({', '.join(self.names)})", "pass them as to compile"
            )
        have = dict(self.constants)
        for name, value in zip(self.names, given, strict=True):
            declared = self.einsums.inputs[name]
            tensor = value if isinstance(value, SparseTensor) else from_torch(name, value, declared.format)
            if tensor.shape != declared.shape:
                raise SparseError(f"input {name!r} has shape {tensor.shape}, not {declared.shape}", "compile it anew")
            have[name] = prune(tensor) if name in self.pruned else tensor
        if inputs:
            self.check_unbroken(have)
        return have

    def check_unbroken(self, have: Mapping[str, SparseTensor]) -> None:
        """
        Raises:
            SparseError: a mask leaves nothing of a row, and none of those that the program was compiled with did.
        """
        steps = {step.name: step for step in self.einsums.steps if isinstance(step, Move)}

        def moved(name: str) -> SparseTensor:
            return have[name] if name in have else perform(steps[name], [moved(x) for x in steps[name].operands])

        for name, dim in self.unbroken:
            if len(bare_fibers(moved(name), dim)):
                raise SparseError(
                    f"the mask {name!r} leaves nothing of a row, which no mask did that the program was compiled with",
                    "compile it with a mask that does: that program takes both kinds",
                )

    def free(self, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
        """The inputs without those that were compiled in, which have to be what they were."""
        if not self.fixed or len(inputs) != len(self.given):
            return inputs
        free = []
        for name, value in zip(self.given, inputs, strict=True):
            if name not in self.fixed:
                free.append(value)
            elif not isinstance(value, torch.Tensor) or not _same(value, self.fixed[name]):
                raise SparseError(f"{name!r} is not what the program was compiled for", "compile it anew")
        return tuple(free)

    def _feed(self, region: Region, have: Mapping[str, SparseTensor]) -> dict[str, SparseTensor]:
        return {name: self.view(name, source, format, have) for name, (source, format) in region.inputs.items()}

    def view(self, name: str, source: Source, format: Format, have: Mapping[str, SparseTensor]) -> SparseTensor:
        """A tensor in the format that a region reads it in."""
        if isinstance(source, int):
            empty = np.zeros((0, format.block, format.block)) if format.block > 1 else np.zeros(0)
            return SparseTensor(name, (source,), format, (Level(source),), empty)
        if isinstance(source, Edge):
            return source.tensor(name)
        key = (source, name, format)
        if key in self._views:
            return self._views[key]
        tensor = have[source]
        stored = to_tiles(tensor, name, format) if isinstance(format, TileFormat) else repack(tensor, format, name)
        if source in self.constants:
            self._views[key] = stored
        return stored


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.layout != b.layout:
        return False
    return torch.equal(a, b) if a.layout == torch.strided else bool((a.to_dense() == b.to_dense()).all())


def compile_einsum(
    text: str,
    operands: Sequence[Value],
    schedule: Schedule | None = None,
    *,
    names: Sequence[str] = (),
    formats: Sequence[Format | None] = (),
) -> Program:
    """Compile ``'ik,kj->ij'``, or a chain as ``'ik,kj,jl->il'``, over sparse tensors.

    Args:
        operands: one a term; torch tensors are stored as ``formats`` say, else as their layout does (a strided one is
            dense).
        schedule: default ``Schedule()``: fused where that is expected to take fewer cycles.
        names: of the operands; default B, C, D, ...

    Raises:
        SparseError: text, operands or schedule that do not fit together.
    """
    names = tuple(names) or tuple("BCDEFGHIJKLMNOPQRSUVWXYZ"[: len(operands)])
    if len(names) != len(operands):
        raise SparseError(f"{len(names)} names of {len(operands)} operands", "name each operand once")
    tensors = []
    for n, (name, value) in enumerate(zip(names, operands, strict=True)):
        format = formats[n] if n < len(formats) else None
        value = plain(value)
        if isinstance(value, SparseTensor):
            tensors.append(repack(value, format or value.format, name))
        else:
            tensors.append(from_torch(name, value, format))
    declared = [(name, declare(tensor)) for name, tensor in zip(names, tensors, strict=True)]
    program = parse(text, declared)
    return Program(program, schedule or Schedule(), names, {}, tensors)


def declare(tensor: SparseTensor, free: bool = False) -> Declared:
    """A tensor's declaration; ``free``: its levels in whatever order a schedule wants."""
    if free and "compressed" not in tensor.format.levels:
        return Declared(tensor.shape, None)
    fibers, extents = 1.0, []
    for level in tensor.levels:
        count = float(level.size if level.crd is None else len(level.crd) / max(fibers, 1.0))
        extents.append(count)
        fibers *= count
    return Declared(tensor.shape, tensor.format, tuple(extents), free=free)

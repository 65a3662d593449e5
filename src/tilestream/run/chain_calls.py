"""The calls that a region and the sums of its gradients become where they are joined: what each takes and leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from tilestream.graph.lowering import Steps
from tilestream.graph.region import Operand
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.plan.pairs import Pair
from tilestream.run.spec import TENSOR, RegionSpec, ResultSpec, spec_of

TURN: Steps = (("t",),)

Takes = tuple[int | str, ...]
"""Of a call: numbers of what is ``given``, and names of what a call before it has left."""


@dataclass(frozen=True)
class ChainCalls:
    """The calls of a pair on one kind of target, in order."""

    pair: Pair
    kind: str

    @cached_property
    def region(self) -> RegionSpec:
        """The region by itself."""
        return spec_of(self.pair.cut.region, self.pair.rows_by, self.kind)

    @cached_property
    def given(self) -> list[Tensor]:
        """Fake tensors: the region's arguments, then operands of the sums that it neither takes nor makes."""
        arguments = self.pair.cut.region.graph.graph.find_nodes(op="placeholder")
        beside = self.pair.beside.values()
        return [*(n.meta["val"] for n in arguments), *(self.pair.launch.widened(n) for n in beside)]

    @cached_property
    def names(self) -> list[str]:
        """Results that the graph takes: those of the sums, then what others read of the region's."""
        return [*self.pair.launch.results, *self.pair.wanted]

    @cached_property
    def calls(self) -> list[tuple[RegionSpec, Takes]]:
        """What the operator is told of each launch, and what it takes."""
        made: list[tuple[RegionSpec, Takes]] = []
        left: dict[str, ResultSpec] = {}
        for pipeline in self.pair.joined.pipelines:
            made.append(self._call(pipeline, left))
            left |= {r.tensor: r for r in made[-1][0].results}
        return made

    @cached_property
    def _operands(self) -> dict[str, Operand]:
        """Inputs and parameters of the chain by tensor; their index counts what is ``given``."""
        cut, launch = self.pair.cut, self.pair.launch
        dtype, first = TORCH_DTYPES[launch.layers[0].dtype], len(cut.region.arguments)
        beside = [Operand(name, first + k, (), dtype) for k, name in enumerate(self.pair.beside)]
        turned = [
            replace(o, steps=o.steps[:-1] if o.steps[-1:] == TURN else (*o.steps, *TURN)) for o in cut.region.parameters
        ]
        return {o.tensor: o for o in (*cut.region.inputs, *beside, *turned)}

    def _call(self, pipeline: Pipeline, left: dict[str, ResultSpec]) -> tuple[RegionSpec, Takes]:
        """One launch; ``left``: what those before it have left."""
        operands = self._operands
        wanted = [t.name for t in pipeline.tensors if t.role is not Role.OUTPUT]
        takes = tuple(dict.fromkeys(operands[n].index if n in operands else n for n in wanted))

        def operand(name: str) -> Operand:
            if name in operands:
                return replace(operands[name], index=takes.index(operands[name].index))
            tensor = pipeline.tensor(name)
            steps: Steps = () if _is_matrix(left[name]) else (("flatten", tensor.features),)
            return Operand(name, takes.index(name), steps, TORCH_DTYPES[tensor.dtype])

        layouts = [self._layout(n, pipeline) for n in takes]
        static = all(isinstance(size, int) for layout in layouts for part in layout for size in part)
        static = static and all(_is_matrix(left[n]) for n in takes if isinstance(n, str))
        spec = RegionSpec(
            target=self.kind,
            pipeline=pipeline,
            arguments=(TENSOR,) * len(takes),
            inputs=tuple(operand(t.name) for t in pipeline.by_role(Role.INPUT)),
            parameters=tuple(operand(t.name) for t in pipeline.by_role(Role.PARAMETER)),
            results=tuple(self._result(t.name, pipeline) for t in pipeline.by_role(Role.OUTPUT)),
            sizes=(),
            layouts=tuple(layouts) if static else (),
        )
        return spec, takes

    def _layout(self, n: int | str, pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if isinstance(n, str):
            columns = pipeline.tensor(n).features
            return (self.pair.launch.rows, columns), (columns, 1)
        return tuple(self.given[n].shape), tuple(self.given[n].stride())

    def _result(self, name: str, pipeline: Pipeline) -> ResultSpec:
        if name in self.pair.launch.results:  # without the columns that a gradient was padded by
            return ResultSpec(name, pipeline.tensor(name).shape)
        if name in self.pair.wanted:
            return next(r for r in self.region.results if r.tensor == name)
        return ResultSpec(name, (self.pair.launch.rows, pipeline.tensor(name).features))


def _is_matrix(result: ResultSpec) -> bool:
    """Whether a result lies as the row-major matrix that a launch reads; others also read it under more dimensions."""
    return len(result.shape) == 2 and result.order is None

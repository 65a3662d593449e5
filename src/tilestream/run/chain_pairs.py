"""A region's call and that of the sums of its gradients, found in a graph, and the calls that they are joined to."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tilestream.graph.lowering import Steps
from tilestream.graph.nodes import value
from tilestream.graph.origins import bare, is_made_of, origin_of, unpadded
from tilestream.graph.region import Operand
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.plan.backward_chains import Joined, join
from tilestream.plan.gradients import STRATEGY as SUMS
from tilestream.plan.gradients import gradients
from tilestream.run.operator import REGION
from tilestream.run.spec import TENSOR, RegionSpec, ResultSpec, decode
from tilestream.run.target import Target

TURN: Steps = (("t",),)


@dataclass(frozen=True)
class Pair:
    """Two calls of a graph: a region, and the stationary sums of its results.

    Attributes:
        given: nodes that the joined call takes: the region's arguments, then the sums' that are no results of it.
        joined: what both are together.
    """

    region: fx.Node
    sums: fx.Node
    given: tuple[fx.Node, ...]
    operands: tuple[Operand, ...]
    wanted: tuple[str, ...]
    joined: Joined
    rows: int


def find_pair(sums: fx.Node, target: Target) -> Pair | None:
    """The pair whose second call is ``sums``; None where it is no such call, or its gradients are not one region's.

    Raises:
        VerifyError: the two are no backward chain.
    """
    told, arguments = decode(str(sums.args[2])), tensors_of(sums)
    if told.pipeline.strategy != SUMS:
        return None
    summed = gradients(told.pipeline)
    dys = [arguments[o.index] for o in told.inputs if o.tensor in summed]
    makers = {whole for node in dys if (whole := maker_of(node)) is not None}
    if len(makers) != 1:
        return None
    (region,) = makers
    rows_told = decode(str(region.args[2]))
    if rows_told.pipeline.strategy == SUMS or rows_told.sizes or len(rows_told.arguments) != len(tensors_of(region)):
        return None
    inputs = {(origin_of(tensors_of(region)[o.index]), bare(o.steps)): o.tensor for o in rows_told.inputs}
    same: dict[str, str] = {}
    given, operands = list(tensors_of(region)), [*rows_told.inputs]
    for operand in told.inputs:
        node = arguments[operand.index]
        if maker_of(node) is region:
            same[operand.tensor] = rows_told.results[result_of(node)].tensor
            continue
        known = inputs.get((unpadded(node), bare(operand.steps)))
        if known is not None:
            same[operand.tensor] = known
            continue
        if is_made_of(unpadded(node), {region}):
            return None
        operands.append(replace(operand, index=len(given)))
        given.append(node)
    used = [u for u in region.users if any(reader is not sums for reader in _readers(u))]
    if any(u.target is not operator.getitem for u in region.users):
        return None
    wanted = tuple(rows_told.results[result_of(u)].tensor for u in used)
    rows = hint(value(tensors_of(sums)[0]).shape[0])  # pyright: ignore[reportOptionalMemberAccess]
    joined = join(rows_told.pipeline, told.pipeline, same, wanted, rows, target.hardware)
    operands += [
        replace(o, steps=o.steps[:-1] if o.steps[-1:] == TURN else (*o.steps, *TURN)) for o in rows_told.parameters
    ]
    return Pair(region, sums, tuple(given), tuple(operands), wanted, joined, rows)


def tensors_of(call: fx.Node) -> list[fx.Node]:
    assert isinstance(call.args[0], list | tuple)
    return [n for n in call.args[0] if isinstance(n, fx.Node)]


def maker_of(node: fx.Node) -> fx.Node | None:
    """The call whose result a node is, under any leading dimensions."""
    node = origin_of(node)
    whole = node.args[0] if node.target is operator.getitem else None
    return whole if isinstance(whole, fx.Node) and whole.target is REGION else None


def result_of(node: fx.Node) -> int:
    """Which result of its maker a node is."""
    index = origin_of(node).args[1]
    assert isinstance(index, int)
    return index


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who uses a node, under any leading dimensions."""
    return [r for user in node.users for r in (_readers(user) if origin_of(user) is not user else [user])]


def names(pair: Pair) -> list[str]:
    """Results of the joined call, as the graph takes them: those of the sums, then what is left of the region's."""
    return [*(r.tensor for r in decode(str(pair.sums.args[2])).results), *pair.wanted]


def arguments(pair: Pair) -> list[list[int | str]]:
    """Of each launch: numbers of ``pair.given``, and names of what a launch before it has left."""
    found: list[list[int | str]] = []
    by_name = {o.tensor: o.index for o in pair.operands}
    for pipeline in pair.joined.pipelines:
        wanted = [t.name for t in pipeline.tensors if t.role is not Role.OUTPUT]
        found.append(list(dict.fromkeys(by_name.get(name, name) for name in wanted)))
    return found


def specs(pair: Pair, kind: str) -> list[RegionSpec]:
    """What the operator is told of each launch."""
    made: list[RegionSpec] = []
    by_name = {o.tensor: o for o in pair.operands}
    left: dict[str, ResultSpec] = {}
    for pipeline, nodes in zip(pair.joined.pipelines, arguments(pair), strict=True):

        def operand(
            name: str, nodes: list[int | str] = nodes, pipeline: Pipeline = pipeline, left: dict[str, ResultSpec] = left
        ) -> Operand:
            own = by_name.get(name)
            if own is not None:
                return replace(own, index=nodes.index(own.index))
            steps: Steps = () if _is_matrix(left[name]) else (("flatten", pipeline.tensor(name).features),)
            return Operand(name, nodes.index(name), steps, TORCH_DTYPES[pipeline.tensor(name).dtype])

        outputs = pipeline.by_role(Role.OUTPUT)
        fakes = [_fake(pair, n, pipeline) for n in nodes]
        static = all(isinstance(size, int) for f in fakes for size in (*f[0], *f[1]))
        static = static and all(_is_matrix(left[n]) for n in nodes if isinstance(n, str))
        made.append(
            RegionSpec(
                target=kind,
                pipeline=pipeline,
                arguments=(TENSOR,) * len(nodes),
                inputs=tuple(operand(t.name) for t in pipeline.by_role(Role.INPUT)),
                parameters=tuple(operand(t.name) for t in pipeline.by_role(Role.PARAMETER)),
                results=tuple(_result(pair, t.name, pipeline) for t in outputs),
                sizes=(),
                layouts=tuple(fakes) if static else (),
            )
        )
        left |= {r.tensor: r for r in made[-1].results}
    return made


def _is_matrix(result: ResultSpec) -> bool:
    """Whether a result lies as the row-major matrix that a launch reads; others also read it under more dimensions."""
    return len(result.shape) == 2 and result.order is None


def _fake(pair: Pair, n: int | str, pipeline: Pipeline) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if isinstance(n, str):
        columns = pipeline.tensor(n).features
        return (pair.rows, columns), (columns, 1)
    fake = value(pair.given[n])
    assert fake is not None
    return tuple(fake.shape), tuple(fake.stride())


def _result(pair: Pair, name: str, pipeline: Pipeline) -> ResultSpec:
    for call in (pair.sums, pair.region):
        told = next((r for r in decode(str(call.args[2])).results if r.tensor == name), None)
        if told is not None and call is pair.sums:  # without the columns that a gradient was padded by
            return replace(told, shape=pipeline.tensor(name).shape)
        if told is not None and name in pair.wanted:
            return told
    return ResultSpec(name, (pair.rows, pipeline.tensor(name).features))

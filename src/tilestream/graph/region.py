"""A group of fx nodes becomes a Region: a one-stage program, and how tensors go in and out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import sympy
import torch
from torch import fx

from tilestream.graph import operators
from tilestream.graph.lowering import MAX_FEATURES, Binding, Emitter, Steps, Value
from tilestream.graph.modules import lazy
from tilestream.graph.nodes import Unsupported, computes, is_constant, is_ours, name, tensor_of, value
from tilestream.graph.provenance import source
from tilestream.graph.sizes import expression, hint, product
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.ir.tileops import OPS
from tilestream.ir.ways import reached


@dataclass(frozen=True)
class Operand:
    """Where a tensor of the program comes from: argument ``index`` (of ``dtype``) of the region, after ``steps``."""

    tensor: str
    index: int
    steps: Steps
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """One result of the region: tensor ``tensor`` of the program, reshaped.

    ``shape`` has ints and expressions of the region's symbolic sizes. ``order`` is the order of the
    dimensions in memory where the model expects another than row-major.
    """

    tensor: str
    shape: tuple[int | sympy.Expr, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class EdgeArguments:
    """Which arguments of a ragged region lists of edges are.

    Attributes:
        order, starts, busy: of ``tilestream::segments``; ``order`` and ``busy`` are -1 where edges lie side by side.
        receivers: what was sorted; -1 where the region does not read it.
        sources: other indices of edges, each as it is and in sorted order (the same where nothing is sorted), with how
            many rows it names.
    """

    order: int
    starts: int
    busy: int
    receivers: int
    sources: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Region:
    """A convex group of ATen operators that is compiled as one.

    ``program`` is one stage with every operation in topological order. ``graph`` is the region
    alone, for eager and Inductor; it takes ``arguments`` (names of nodes of the outer graph) and
    returns ``results`` as a tuple. ``symbols`` tells which argument's dimension is which symbolic
    size; dimension ``-1`` means the argument is the size itself. ``rows`` is the number of rows in
    the call that was captured. ``minor``: it has little of its graph's time (``plan.minor``). ``cold``: its weights
    are not in the L2 when it starts (``plan.find``).
    """

    name: str
    program: Pipeline
    graph: fx.GraphModule
    arguments: tuple[str, ...]
    inputs: tuple[Operand, ...]
    parameters: tuple[Operand, ...]
    results: tuple[Result, ...]
    symbols: tuple[tuple[sympy.Symbol, int, int], ...]
    rows: int
    device: torch.device
    operators: tuple[str, ...]
    sources: tuple[str, ...]
    edges: EdgeArguments | None = None
    minor: bool = False
    cold: bool = False


def lower(
    owner: fx.GraphModule,
    nodes: Sequence[fx.Node],
    known: Mapping[fx.Node, Value],
    title: str,
    widest: int = MAX_FEATURES,
    wide: frozenset[fx.Node] = frozenset(),
    training: bool = False,
) -> tuple[Region, tuple[fx.Node, ...]]:
    """The region of ``nodes`` (in graph order) and its outputs as nodes of the outer graph.

    ``widest``, ``wide``: as ``Emitter``'s. ``training``: what leaves is rounded before others read it.

    Raises:
        Unsupported: with the node that stands in the way.
    """
    members = frozenset(nodes)
    e = Emitter(known, members, widest, wide)
    for node in nodes:
        try:
            operators.emit(e, node)
        except Unsupported as reason:
            raise Unsupported(reason.reason, node) from reason
    outputs = tuple(n for n in nodes if any(u not in members for u in n.users))
    results = tuple(_store(e, node, index) for index, node in enumerate(outputs))
    ops = fuse_rms_norm(tuple(e.ops), e.tensors)
    stage = Stage.of("all", round_results(ops) if training else ops)
    program = Pipeline("region", tuple(e.tensors.values()), (stage,), ())
    rows = _counted(e, outputs[0])
    return region_of(owner, title, nodes, dict(zip(outputs, results, strict=True)), program, e, rows), outputs


class Bound(Protocol):
    """What a program reads: operands by row, and whole ones."""

    inputs: list[Binding]
    parameters: list[Binding]


def region_of(
    owner: fx.GraphModule,
    title: str,
    nodes: Sequence[fx.Node],
    results: Mapping[fx.Node, Result],
    program: Pipeline,
    bound: Bound,
    rows: int,
    beside: Sequence[fx.Node] = (),
) -> Region:
    """The region that ``program`` is of.

    Args:
        results: those of ``nodes`` that others use.
        rows: in the call that was captured.
        beside: what its operators read besides what the program does.

    Raises:
        Unsupported: the size of a result is not known before it runs.
    """
    bindings = (*bound.inputs, *bound.parameters)
    graph, arguments = extract(owner, tuple(results), dict.fromkeys((*(b.node for b in bindings), *beside)))
    position = {node: index for index, node in enumerate(arguments)}
    operands = {b.tensor: Operand(b.tensor, position[b.node], _needed(b), b.node.meta["val"].dtype) for b in bindings}
    symbols = _symbols(arguments)
    told = {symbol for symbol, _, _ in symbols} | _sizes_given(owner)
    for node, result in results.items():
        _readable(result, told, node)
    fake = tensor_of(next(iter(results)))
    compute = [n for n in nodes if computes(n)]
    return Region(
        name=title,
        program=program,
        graph=graph,
        arguments=tuple(n.name for n in arguments),
        inputs=tuple(operands[b.tensor] for b in bound.inputs),
        parameters=tuple(operands[b.tensor] for b in bound.parameters),
        results=tuple(results.values()),
        symbols=symbols,
        rows=rows,
        device=fake.device,
        operators=tuple(name(n) for n in compute if not is_ours(n)),
        sources=tuple(dict.fromkeys(s for s in map(source, compute) if s)),
    )


def _needed(binding: Binding) -> Steps:
    """The steps without a first one that would change nothing: it costs time at every call."""
    fake, steps = binding.node.meta["val"], binding.steps
    idle = {0: (("scalar",),), 1: (("vector", fake.shape[-1] if fake.dim() else 1),)}.get(fake.dim(), ())
    if fake.dim() == 2:
        idle = (("flatten", fake.shape[-1]),)
    return steps[1:] if steps[:1] == idle else steps


def extract(
    owner: fx.GraphModule, outputs: Sequence[fx.Node], inputs: Iterable[fx.Node]
) -> tuple[fx.GraphModule, tuple[fx.Node, ...]]:
    """The part of a graph between ``inputs`` and ``outputs`` as a module of its own, and its arguments.

    Placeholders and constants of the outer graph that are reached are arguments too.
    """
    stops = set(inputs)
    needed = stops | reached(outputs, lambda n: () if n in stops else n.all_input_nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    ordered = sorted(needed)  # as they stand in the graph, of which a region is a small part
    arguments = tuple(n for n in ordered if n in stops or n.op == "placeholder" or is_constant(n))
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if is_constant(node):
            copies[node].meta["constant"] = getattr(owner, str(node.target))
    for node in ordered:
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    result = graph.output(tuple(copies[n] for n in outputs))
    result.meta["val"] = tuple(n.meta.get("val") for n in outputs)
    return lazy(owner, graph), arguments


def _store(e: Emitter, node: fx.Node, index: int) -> Result:
    fake, own = value(node), e.values[node]
    if fake is None or own.tile.name in e.deferred:
        raise Unsupported("a result that is no tile leaves the region", node)
    title = f"y{index}"
    dtype = own.tile.dtype
    e.tensors[title] = Tensor.of(title, Role.OUTPUT, (own.tile.features,), dtype)
    e.ops.append(TileOp("store", None, (own.tile.name,), (title,), (), source(node)))
    return result_of(node, title)


def result_of(node: fx.Node, tensor: str) -> Result:
    """A node's value as a result of its region.

    Raises:
        Unsupported: it has gaps in memory.
    """
    shape = tuple(d if isinstance(d, int) else expression(d) for d in node.meta["val"].shape)
    return Result(tensor, shape, _order(node))


def _order(node: fx.Node) -> tuple[int, ...] | None:
    fake = node.meta["val"]
    strides = [hint(s) for s in fake.stride()]
    order = tuple(sorted(range(fake.dim()), key=lambda i: (-strides[i], i)))
    for dims in (tuple(range(fake.dim())), order):
        expected = [product([fake.shape[d] for d in dims[k + 1 :]]) for k in range(len(dims))]
        if all(
            hint(fake.shape[d]) == 1 or expression(fake.stride(d)) == x for d, x in zip(dims, expected, strict=True)
        ):
            return None if dims == tuple(range(fake.dim())) else order
    raise Unsupported("its result has gaps in memory", node)


def _symbols(arguments: Sequence[fx.Node]) -> tuple[tuple[sympy.Symbol, int, int], ...]:
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    for index, node in enumerate(arguments):
        fake = node.meta.get("val")
        dims = [(-1, fake)] if isinstance(fake, torch.SymInt) else []
        if isinstance(fake, torch.Tensor):
            dims = list(enumerate(fake.shape))
        for dim, size in dims:
            expr = expression(size)
            if isinstance(expr, sympy.Symbol):
                found.setdefault(expr, (index, dim))
    return tuple((symbol, index, dim) for symbol, (index, dim) in found.items())


def _readable(result: Result, known: Collection[sympy.Basic], node: fx.Node) -> None:
    """The shape of a result must follow from sizes that can be read off the arguments, or are the graph's own. Where
    what comes in is five times as long as what ``unique`` found, none can."""
    sizes = {s for d in result.shape if isinstance(d, sympy.Expr) for s in d.free_symbols}
    if not sizes <= set(known):
        raise Unsupported("the size of its result cannot be read off what the region is given", node)


def _sizes_given(owner: fx.GraphModule) -> set[sympy.Expr]:
    """Sizes that are arguments of the graph themselves."""
    values = (n.meta.get("val") for n in owner.graph.find_nodes(op="placeholder"))
    return {expression(v) for v in values if isinstance(v, torch.SymInt)}


def _counted(e: Emitter, output: fx.Node) -> int:
    """Rows in the call that was captured: of the first input; of pixels alone, those of a result."""
    node, features = output, e.values[output].tile.features
    if e.inputs:
        node, features = e.inputs[0].node, e.tensors[e.inputs[0].tensor].features
    fake = tensor_of(node)
    return math.prod(hint(dim) for dim in fake.shape) // features


def round_results(ops: tuple[TileOp, ...]) -> tuple[TileOp, ...]:
    """Where a result of less than fp32 is also read by ops that would see it unrounded, they read it rounded.

    Operands of a linear are rounded anyway, through ``cat`` and ``slice`` too, and so is what was loaded or cast.

    What a training graph saves is what it goes on with. A kernel keeps values in fp32 from op to op, and rounds them
    where they leave. In a training graph what leaves is read again by the other half: statistics of unrounded values
    beside rounded ones make gradients several times as far off as eager's (MeshGraphNets: 4.6 times).
    """
    stored = {name for op in ops if op.kind == "store" for name in op.ins}
    made: list[TileOp] = []
    names: dict[str, str] = {}
    for op in ops:
        op = op.reading(names)
        made.append(op)
        out = op.out
        is_exact = op.kind in ("load", "cast") or OPS[op.kind].family == "layout"
        if out is None or out.dtype == "f32" or is_exact:
            continue
        if out.name not in stored or not _unrounded(out.name, ops):
            continue
        rounded = Tile.of(f"rounded{len(names)}", out.features, out.dtype)
        made.append(TileOp("cast", rounded, (out.name,), (), (), op.source))
        names[out.name] = rounded.name
    return tuple(made)


def _unrounded(name: str, ops: tuple[TileOp, ...]) -> bool:
    """Whether an op reads the tile in fp32."""
    for op in ops:
        if name not in op.ins or op.kind in ("store", "linear"):
            continue
        if OPS[op.kind].family != "layout" or (op.out is not None and _unrounded(op.out.name, ops)):
            return True
    return False


_CHAIN = ("square", "mean", "add", "rsqrt", "mul")
"""The pieces, first to last; the last multiplies by ``x`` again."""


def fuse_rms_norm(ops: tuple[TileOp, ...], tensors: Mapping[str, Tensor]) -> tuple[TileOp, ...]:
    """``x * rsqrt(mean(x * x) + eps)``, times a vector if one follows, becomes one ``rms_norm``: so torch has traced
    ``torch.nn.RMSNorm`` under Dynamo.

    Both forms compute in fp32; the fused one spares five names and lets a kernel keep the row.
    """
    uses = Counter(n for op in ops for n in op.ins)
    makers = {op.out.name: op for op in ops if op.out is not None}
    users = {n: op for op in ops for n in op.ins}
    gone: set[str] = set()
    fused: dict[str, TileOp] = {}
    for op in ops:
        found = _match(op, makers, uses)
        if found is None or op.out is None:
            continue
        x, eps, inner = found
        last, params = op, ()
        after = users.get(op.out.name)
        if after is not None and after.kind == "mul" and uses[op.out.name] == 1:
            if [tensors[name].shape for name in after.params] == [(op.out.features,)]:  # no scalar, nor a wider vector
                last, params = after, after.params
                inner = [*inner, op.out.name]
        gone.update(inner)
        fused[last.made.name] = replace(last, kind="rms_norm", tiles=(x,), tensors=params, attrs=(("eps", eps),))
    return tuple(
        fused.get(op.out.name, op) if op.out is not None else op
        for op in ops
        if op.out is None or op.out.name not in gone
    )


def _match(op: TileOp, makers: dict[str, TileOp], uses: Counter[str]) -> tuple[str, float, list[str]] | None:
    if op.kind != "mul" or len(op.ins) != 2:
        return None
    for x, scale in (op.ins, op.ins[::-1]):
        names, at = [], scale
        for kind in reversed(_CHAIN[:-1]):
            maker = makers.get(at)
            if maker is None or maker.kind != kind or uses[at] != 1 or maker.params or len(maker.ins) != 1:
                break
            names.append(at)
            at = maker.ins[0]
        else:
            eps = makers[names[1]].attr("scalar")
            if at == x and isinstance(eps, float):
                return x, eps, names
    return None

"""From a graph of operators to a workload: every pass by name, in order, for each way to execute a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from tilestream.devices import Device
from tilestream.errors import OptionError, PlanError
from tilestream.graph.costs.table import Kind
from tilestream.graph.selection import Exclusion
from tilestream.ir.verify import verify
from tilestream.simulator.launch import simulate
from tilestream.simulator.library import Cache, with_cached
from tilestream.simulator.tables import spilled_bytes
from tilestream.simulator.workload import Engine, SimLaunch, Workload
from tilestream.studies.kitsune.compiler.choose import choose_tiles
from tilestream.studies.kitsune.compiler.fuse_epilogues import fuse_epilogues
from tilestream.studies.kitsune.compiler.launch import launch
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.compiler.patterns import DEEP, KITSUNE, VERTICAL, WHOLE, Pattern
from tilestream.studies.kitsune.compiler.selection import Selection, SfNode, schedule, select
from tilestream.studies.kitsune.compiler.split_reductions import split_reductions
from tilestream.studies.kitsune.compiler.staged import NotLowered, Staged, staged
from tilestream.studies.kitsune.compiler.traffic import reads, traffic, writes
from tilestream.studies.kitsune.workloads import library_kernels


@dataclass(frozen=True)
class Library:
    """A launch that is no pipeline: operators as a library runs them."""

    operators: tuple[str, ...]


@dataclass(frozen=True)
class Design:
    """How a graph runs on a device.

    Attributes:
        execution: one of ``EXECUTIONS``.
        selection: subgraphs, and why other operators are in none.
        groups: the pipelines of spatial subgraphs, with CTAs and tiles.
        workload: one launch a subgraph, or an operator outside of them.
        traffic_bytes: off the chip, over all launches, nothing being kept in the L2 between them; what the rings of a
            pipeline spill counts.
        reuse: whether the workload is credited for what the L2 keeps between launches.
        complete: whether concatenations of complete values may be in subgraphs (``select``).
    """

    graph: OperatorGraph
    device: Device
    execution: str
    selection: Selection
    groups: tuple[Staged, ...] = ()
    workload: Workload = Workload("", ())
    reuse: bool = False
    complete: bool = False

    @property
    def operators(self) -> int:
        return len(self.graph)

    @property
    def fused(self) -> int:
        return self.selection.fused

    @cached_property
    def traffic_bytes(self) -> float:
        return traffic(self.graph, self.units) + sum(spilled_bytes(x, self.device) for x in self.workload.launches)

    @cached_property
    def launches(self) -> tuple[Staged | Library, ...]:
        """The plan: every launch in order, a pipeline of the IR that the verifier has accepted, or the library's.

        Raises:
            PlanError: an operator of a vertical group has no lowering to axes.
            VerifyError: a pipeline is not legal.
        """
        made = {p.node.ops: p for p in self.groups}
        for node in self.selection.nodes:
            if node.ops not in made:
                made[node.ops] = staged(node, self.graph, vertical=True)
            verify(made[node.ops].pipeline)
        return tuple(made.get(ops) or self._alone(ops) for ops in self.units)

    def _alone(self, ops: tuple[str, ...]) -> Staged | Library:
        """Operators outside of all subgraphs: what looks up or adds rows by an index is a pipeline of one stage."""
        if self.graph[ops[0]].kind in (Kind.GATHER, Kind.SCATTER):
            try:
                made = staged(SfNode(ops[0], ops, "rows by an index"), self.graph, vertical=True)
                verify(made.pipeline)
            except PlanError:
                return Library(ops)
            return made
        return Library(ops)

    @property
    def pipelines(self) -> tuple[Staged, ...]:
        """The launches that are pipelines."""
        return tuple(x for x in self.launches if isinstance(x, Staged))

    @cached_property
    def units(self) -> list[tuple[str, ...]]:
        """Operators of each launch, in order."""
        return schedule(self.graph, [n.ops for n in self.selection.nodes])


Pass = Callable[[Design], Design]


def design(
    graph: OperatorGraph, device: Device, execution: str = "kitsune", *, reuse: bool = False, complete: bool = False
) -> Design:
    """``graph`` as launches on ``device``.

    Args:
        execution: ``bulk``, one kernel an operator; ``vertical``, the paper's model of vertical fusion; ``kitsune``,
            the paper's spatial pipelines; ``deep``, with longer pipelines in the backward graph; ``whole``, every
            MLP whose rows one CTA holds as one kernel, as this compiler fuses; ``mixed``, whatever of all this is the
            fastest for a region.
        reuse: credit every launch for what the L2 keeps from those before it (``simulator.library.Cache``).
        complete: of ``vertical`` and ``kitsune``, whether subgraphs may hold concatenations of complete values.

    Raises:
        OptionError: no such execution.
        PlanError: a pipeline does not fit on the device even when it is cut into its operators.
    """
    if execution not in EXECUTIONS:
        raise OptionError(f"execution is {execution!r}", f"use one of {', '.join(EXECUTIONS)}")
    made = Design(graph, device, execution, Selection((), ()), reuse=reuse, complete=complete)
    for run in EXECUTIONS[execution]:
        made = run(made)
    return made


def leave_all(d: Design) -> Design:
    """Nothing is fused."""
    reason = "bulk-synchronous: every operator is a kernel"
    return replace(d, selection=Selection((), tuple(Exclusion(op.name, op.source, reason) for op in d.graph)))


def select_spatial(d: Design) -> Design:
    """Exclusion rules and patterns (3.1); every operator of a subgraph a stage."""
    return _selected(d, KITSUNE)


def select_deep(d: Design) -> Design:
    """As ``select_spatial``, with consecutive layers of the backward graph in one pipeline."""
    return _selected(d, DEEP)


def _selected(d: Design, library: tuple[Pattern, ...]) -> Design:
    selection, groups = _staged(d.graph, library, d.complete)
    return replace(d, selection=selection, groups=groups)


@lru_cache(maxsize=8)
def _staged(
    graph: OperatorGraph, library: tuple[Pattern, ...], complete: bool = False
) -> tuple[Selection, tuple[Staged, ...]]:
    """Of any device. What has no lowering to axes is in no pipeline: it is excluded, with that as the reason."""
    refused: dict[str, str] = {}
    while True:
        selection = select(graph, library, refused, complete)
        try:
            return selection, tuple(staged(node, graph) for node in selection.nodes)
        except NotLowered as why:
            refused[why.op.name] = why.reason


def select_whole(d: Design) -> Design:
    """Whole MLPs, each a vertical kernel of this compiler's kind."""
    selection = select(d.graph, WHOLE)
    held = (_whole(node, d) for node in selection.nodes if node.pattern == "whole mlp")
    return replace(d, selection=selection, groups=tuple(p for p in held if p is not None))


def _whole(node: SfNode, d: Design) -> Staged | None:
    """``node`` as one kernel; None where an operator has no lowering to axes."""
    try:
        return staged(node, d.graph, vertical=True)
    except NotLowered:
        return None


def select_groups(d: Design) -> Design:
    """Vertical fusion of what no pipeline has taken."""
    vertical = select(d.graph, VERTICAL, complete=d.complete)
    taken = {name for node in d.selection.nodes for name in node.ops}
    more = tuple(n for n in vertical.nodes if not taken & set(n.ops))
    inside = taken | {name for node in more for name in node.ops}
    why = {e.op: e.reason for e in (*vertical.exclusions, *d.selection.exclusions)}
    rest = tuple(Exclusion(op.name, op.source, why[op.name]) for op in d.graph if op.name not in inside)
    return replace(d, selection=Selection((*d.selection.nodes, *more), rest))


def cut_to_fit(d: Design) -> Design:
    """Cut pipelines with more stages of one engine than the device has SMs into shorter ones, one after another.

    Raises:
        PlanError: the halves of a single operator do not fit.
    """
    kept = [part for p in d.groups for part in _fitting(p, d)]
    if len(kept) == len(d.groups):
        return d
    nodes = tuple(p.node for p in kept)
    return replace(d, groups=tuple(kept), selection=Selection(nodes, d.selection.exclusions))


def _fitting(p: Staged, d: Design) -> list[Staged]:
    """``p``, or the parts of it, of consecutive stages in the graph's order, that fit."""
    if all(sum(p.engine(name) is e for name in p.names) <= d.device.sms for e in Engine):
        return [p]
    ops = p.node.ops
    if len(ops) == 1:
        raise PlanError(
            f"the two halves of {ops[0]!r} do not fit on the {d.device.sms} SMs of {d.device.name}",
            "use a device with more SMs, or strategy vertical",
        )
    middle = len(ops) // 2
    halves = (ops[:middle], ops[middle:])
    nodes = [replace(p.node, name=f"{p.node.name}.{part}", ops=half) for part, half in zip("ab", halves, strict=True)]
    made = (fuse_epilogues(split_reductions(staged(n, d.graph)), d.graph) for n in nodes)
    return [part for half in made for part in _fitting(half, d)]


def split_losers(d: Design) -> Design:
    """Where pipelines of single layers are faster, simulated, than the longer one that joins them, use those."""
    layers = design(d.graph, d.device, "kitsune").groups
    kept: list[Staged] = []
    for p in d.groups:
        parts = [q for q in layers if set(q.node.ops) < set(p.node.ops)]
        complete = sum(len(q.node.ops) for q in parts) == len(p.node.ops)
        faster = complete and sum(_spatial_s(q, d) for q in parts) < _spatial_s(p, d)
        kept += parts if faster else [p]
    nodes = tuple(replace(p.node, name=f"{p.node.name.rpartition('.')[0]}.{i}") for i, p in enumerate(kept))
    groups = tuple(
        replace(p, node=node, pipeline=replace(p.pipeline, name=node.name)) for p, node in zip(kept, nodes, strict=True)
    )
    return replace(d, groups=groups, selection=Selection(nodes, d.selection.exclusions))


def keep_winners(d: Design) -> Design:
    """Run each pipeline the way that is fastest, simulated: as it is, as a whole MLP, or not at all.

    Dropped are those that are slower than the same operators vertically fused as the paper does, or in bulk.
    """
    vertical = select(d.graph, VERTICAL).nodes
    whole = {p.node.ops: choose_tiles(p, d.graph, d.device) for p in select_whole(d).groups}
    both = [min((p, whole.get(p.node.ops, p)), key=lambda q: _spatial_s(q, d)) for p in d.groups]
    kept = tuple(p for p in both if _spatial_s(p, d) < _otherwise_s(p, d, vertical))
    nodes = tuple(p.node for p in kept)
    lost = {name for p in both if p not in kept for name in p.node.ops}
    more = tuple(Exclusion(op.name, op.source, "its pipeline is slower") for op in d.graph if op.name in lost)
    return replace(d, groups=kept, selection=Selection(nodes, (*d.selection.exclusions, *more)))


def _is_kernel(p: Staged) -> bool:
    """Whether a library has no such kernel: several stages, or a whole MLP."""
    return p.vertical or len(p.names) > 1


def _spatial_s(p: Staged, d: Design) -> float:
    if _is_kernel(p):
        return _seconds([launch(p, d.graph, d.device)], d.device)
    return _seconds(library_kernels(p.node.ops, d.graph, d.device), d.device)


def _otherwise_s(p: Staged, d: Design, vertical: Sequence[SfNode]) -> float:
    groups = {name: n.ops for n in vertical if set(n.ops) <= set(p.node.ops) for name in n.ops}
    units = dict.fromkeys(groups.get(name, (name,)) for name in p.node.ops)
    return _seconds([x for ops in units for x in library_kernels(ops, d.graph, d.device)], d.device)


def _seconds(launches: Sequence[SimLaunch], device: Device) -> float:
    return sum(simulate(each, device, device.arbiters).seconds for each in launches)


def _each(change: Callable[[Staged, OperatorGraph, Device], Staged], name: str, about: str | None) -> Pass:
    def run(d: Design) -> Design:
        return replace(d, groups=tuple(change(p, d.graph, d.device) for p in d.groups))

    run.__name__, run.__doc__ = name, about
    return run


def lower(d: Design) -> Design:
    """Launches for the simulator, in an order in which they can run. A pipeline of one stage is one kernel."""
    pipelines = {p.node.ops: p for p in d.groups if _is_kernel(p)}
    launches: list[SimLaunch] = []
    cache = Cache(d.device)
    for ops in d.units:
        if ops in pipelines:
            made = (launch(pipelines[ops], d.graph, d.device),)
        else:
            made = library_kernels(ops, d.graph, d.device)
        share = cache.share(reads(d.graph, ops).items(), writes(d.graph, ops).items()) if d.reuse else 0.0
        launches += [with_cached(kernel, share) for kernel in made]
    return replace(d, workload=Workload(f"{d.graph.name} {d.graph.mode} {d.execution}", tuple(launches)))


PIPELINE: tuple[Pass, ...] = (
    _each(lambda p, g, _: split_reductions(p), "split_reductions", split_reductions.__doc__),
    _each(lambda p, g, _: fuse_epilogues(p, g), "fuse_epilogues", fuse_epilogues.__doc__),
    cut_to_fit,
    _each(choose_tiles, "choose_tiles", choose_tiles.__doc__),
)

EXECUTIONS: dict[str, tuple[Pass, ...]] = {
    "bulk": (leave_all, lower),
    "vertical": (select_groups, lower),
    "kitsune": (select_spatial, *PIPELINE, lower),
    "deep": (select_deep, *PIPELINE, lower),
    "whole": (select_whole, PIPELINE[-1], lower),
    "mixed": (select_deep, *PIPELINE, split_losers, keep_winners, select_groups, lower),
}
"""The passes of each execution."""

PASSES = EXECUTIONS["kitsune"]

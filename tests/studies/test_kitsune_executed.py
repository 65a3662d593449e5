"""Plans of the five applications on the reference machine: values and gradients against eager and float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from small_models import SIZES, Case, small
from table2_graphs import published

from tilestream import devices
from tilestream.graph.costs.table import Kind
from tilestream.ir.axes import Level
from tilestream.ir.derive import Partial, placement
from tilestream.run.oracle import error, tolerance
from tilestream.studies.kitsune import design
from tilestream.studies.kitsune.capture import capture
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.compiler.selection import Selection
from tilestream.studies.kitsune.compiler.staged import Staged
from tilestream.studies.kitsune.designs import PIPELINE, Design, Library, select_deep, select_spatial
from tilestream.studies.kitsune.execute import run
from tilestream.studies.kitsune.record import Mode

pytestmark = pytest.mark.xdist_group("kitsune")  # one process has what is captured
A100 = devices.get("a100+kitsune")
MODES: tuple[Mode, ...] = ("inference", "training")
TEN = [(app, mode) for app in SIZES for mode in MODES]


@cache
def captured(app: str, mode: Mode) -> tuple[Case, OperatorGraph]:
    """A small model and its operators, which designs do not change: a capture takes longer than they do."""
    case = small(app, mode)
    return case, capture(case.module, case.inputs, mode)


def executed(app: str, mode: Mode, execution: str) -> tuple[Design, list[str]]:
    """The design, and what is off by more than twice eager's own error against float64."""
    case, graph = captured(app, mode)
    made = design(replace(graph), A100, execution)  # another graph: what was staged of one is remembered
    torch.set_num_threads(1)
    got = run(made, case.module, case.inputs, case.tangents)
    (outs, gradients), (wide, wide_gradients) = case.eager(), case.eager(wide=True)
    assert len(got.outputs) == len(outs) and got.gradients.keys() == gradients.keys()
    found = [(f"output {i}", *xs) for i, xs in enumerate(zip(got.outputs, outs, wide, strict=True))]
    found += [(f"gradient of {k}", got.gradients[k], gradients[k], wide_gradients[k]) for k in gradients]
    off = []
    for what, mine, eager, exact in found:
        allowed = tolerance(error(eager, exact), mine.dtype)
        if not error(mine, exact) <= allowed:
            off.append(f"{what}: {error(mine, exact):.2g} > {allowed:.2g}")
    return made, off


@pytest.mark.parametrize(("app", "mode"), TEN)
@pytest.mark.every(6)
def test_plans_of_the_five_applications_give_the_right_values_and_gradients(app: str, mode: Mode) -> None:
    made, off = executed(app, mode, "deep")
    assert not off, "\n".join(off)
    assert sum(not by_index(x) for x in made.pipelines) == len(made.selection.nodes) > 0
    done = [name for x in made.launches if isinstance(x, Library) for name in x.operators]
    assert len(done) + made.fused + sum(map(by_index, made.pipelines)) == made.operators
    left = [made.graph[name].label for name in done if made.graph[name].kind in (Kind.GATHER, Kind.SCATTER)]
    assert not left, "rows by an index are pipelines"
    assert any(map(by_index, made.pipelines)) == (app in ("dlrm", "mgn", "graphcast_cut"))


def by_index(x: Staged) -> bool:
    """Whether a launch is an operator of its own that looks up or adds rows by an index."""
    return any(at.index for s in x.pipeline.stages for op in s.ops for v in op.views for at in v.at or ())


OTHERS = [
    pytest.param(app, execution, marks=pytest.mark.exhaustive if app in ("mgn", "graphcast_cut") else ())
    for app in SIZES
    for execution in ("kitsune", "mixed", "vertical", "whole")
]
"""In inference, those of ``kitsune`` and ``deep`` are equal."""


@pytest.mark.parametrize(("app", "execution"), OTHERS)
@pytest.mark.every(3)
def test_other_plans_too(app: str, execution: str) -> None:
    _, off = executed(app, "training", execution)
    assert not off, "\n".join(off)


def test_what_is_saved_is_what_goes_on(monkeypatch) -> None:
    """A norm of values that a vertical kernel never rounded, and its gradient by those that it saved, do not fit."""
    from tilestream.studies.kitsune.lowering.writer import Writer

    monkeypatch.setattr(Writer, "settle", lambda *_: None)
    _, off = executed("mgn", "training", "vertical")
    assert any("gradient" in line for line in off)


# -- what a wrong lowering does


def no_mask(e, node):
    return e.tile(node.args[0])


@pytest.mark.parametrize("broken", ["mask", "bias", "order", "parts"])
@pytest.mark.every(2)
def test_a_wrong_lowering_is_found(broken: str, monkeypatch) -> None:
    from tilestream.studies.kitsune import lowering
    from tilestream.studies.kitsune.lowering import products

    aten = torch.ops.aten
    if broken == "mask":
        monkeypatch.setitem(lowering.ELEMENTWISE, aten.threshold_backward, no_mask)
    elif broken == "bias":
        right = products._operands
        monkeypatch.setattr(products, "_operands", lambda node: (*right(node)[:2], None))
    elif broken == "order":
        right_joined = lowering.parts._joined
        backwards = lambda node: (right_joined(node)[0][::-1], *right_joined(node)[1:])  # noqa: E731
        monkeypatch.setattr(lowering.parts, "_joined", backwards)
    else:  # a sum's parts are not added: only the first CTA's is stored
        monkeypatch.setattr("tilestream.reference.einsum.COMBINE", {"sum": (0.0, lambda a, b: b)})
        monkeypatch.setattr("tilestream.reference.mesh_machine.COMBINE", {"sum": (0.0, lambda a, b: b)})
    _, off = executed("nerf", "training", "kitsune")
    assert off


# -- what the pipelines are


@pytest.fixture(scope="module")
def nerf() -> Design:
    return design(captured("nerf", "training")[1], A100)


def test_a_layers_backward_is_a_multicast_and_a_tree_of_sums(nerf: Design) -> None:
    made = next(x.pipeline for x in nerf.pipelines if "backward" in x.pipeline.name)
    derivative = next(s for s in made.stages if any(op.kind == "relu_backward" for op in s.ops))
    gradient = next(q for q in made.queues if q.producer == derivative.name and len(q.consumers) == 2)
    assert made.tiles()[gradient.tile].axes[0].name == "rows"
    finals = [s for s in made.stages if s.name.endswith(".final")]
    assert len(finals) == 2  # of dW and of db, which rides on the derivative's tiles
    for final in finals:
        (tile,) = final.taken()
        producer = next(s for s in made.stages if tile in s.defined())
        maker = next(op for op in producer.ops if op.out is not None and op.out.name == tile)
        (grid,) = (d for d in producer.mesh if d.level is Level.GRID)
        assert isinstance(placement(maker, grid, producer), Partial)
    assert any(tile.endswith("sum") or ".sum" in tile for f in finals for tile in f.taken())


def test_epilogues_share_a_stage_and_values_between_layers_stay_in_queues() -> None:
    (only,) = design(captured("nerf", "inference")[1], A100).pipelines
    made = only.pipeline
    assert len([t for t in made.tensors if t.role.value == "output"]) == 1
    fused = [s for s in made.stages if {"product", "relu"} <= {op.kind for op in s.ops}]
    assert len(fused) == 9 and all([loop.axis for loop in s.loops] == ["rows"] for s in made.stages)
    assert any(s.replicas > 1 for s in made.stages)


TABLE_2 = [
    (app, mode) for app in (*SIZES, "llama_decode") for mode in MODES if (app, mode) != ("llama_decode", MODES[1])
]


@pytest.mark.parametrize(("app", "mode"), TABLE_2)
@pytest.mark.every(3)
def test_pipelines_of_published_sizes_are_legal_and_are_what_was_designed(app: str, mode: Mode) -> None:
    graph = published(app, mode)
    for chosen in (select_spatial, select_deep):
        made = chosen(Design(graph, A100, "deep", Selection((), ())))
        for change in PIPELINE[:-1]:  # all but the choice of tiles, which takes seconds
            made = change(made)
        designed = [x for x in made.pipelines if not by_index(x)]  # the verifier has accepted each
        assert len(designed) == len(made.groups) > 0
        for p in made.groups:
            _streams_what_the_graph_says(p, graph)


def _streams_what_the_graph_says(p: Staged, graph: OperatorGraph) -> None:
    """Every operator is in a stage, and every value that one stage makes and others read has one queue to all."""
    assert {op.name for ops in p.operators.values() for op in ops} == set(p.node.ops)
    wanted = set()
    for name in p.names:
        for op in p.operators[name]:
            if op.name in p.finals:
                wanted |= {(name, frozenset({p.finals[op.name]}))} if not p.is_final(name) else set()
                continue
            for value in op.outputs:
                readers = {p.holder(r.name) for r in graph.consumers(value) if r.name in p.node.ops} - {name}
                wanted |= {(name, frozenset(readers))} if readers else set()
    assert {(q.producer, frozenset(q.consumers)) for q in p.pipeline.queues} == wanted

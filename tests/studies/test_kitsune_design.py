"""From selection to workloads: split reductions, multicast, epilogues, rings, and nothing lost on the way."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from operator_graphs import Builder, gated_ffn, mlp, nerf, trained_mlp
from places import DOCS
from test_kitsune_selection import random_graphs

from tilestream import devices, simulator
from tilestream.errors import OptionError
from tilestream.ir.rings import tiles_of
from tilestream.simulator import run
from tilestream.simulator.library import launch as library_launch
from tilestream.simulator.tables import spilled
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune import EXECUTIONS, design
from tilestream.studies.kitsune.compiler.choose import balanced, memory_s, predict
from tilestream.studies.kitsune.compiler.launch import launch
from tilestream.studies.kitsune.compiler.schedule import expressible, tile_of
from tilestream.studies.kitsune.compiler.staged import Staged
from tilestream.studies.kitsune.compiler.tiling import TILES, Tile, works
from tilestream.studies.kitsune.compiler.traffic import launch_bytes, traffic
from tilestream.studies.kitsune.designs import Design

A100 = devices.get("a100+kitsune")
H200 = devices.get("h200")


def only(d: Design) -> Staged:
    (p,) = d.groups
    return p


def ops(p: Staged, stage: str) -> tuple[str, ...]:
    return tuple(op.name for op in p.operators[stage])


def total(d: Design, name: str) -> float:
    stages = (s for launch in d.workload.launches for s in launch.stages)
    return sum(getattr(s.work, name) * s.tiles + getattr(s.once, name) * s.ctas for s in stages)


def test_relu_is_an_epilogue_and_concatenation_a_stage_on_the_simt_pipes():
    p = only(design(nerf(), A100))
    assert [ops(p, name) for name in p.names if p.engine(name) is Engine.SIMT] == [("skip",), ("join",), ("out",)]
    assert ops(p, "l0") == ("l0", "relu0") and len(p.names) == 15


def test_one_queue_serves_all_readers():
    p = only(design(nerf(), A100))
    after, size = next(x for x in p.passing if x[0].producer == "l7")
    assert after.consumers == ("alpha", "feature") and size == 2 * 9728 * 256
    assert len(p.passing) == 14  # every value between stages, once


def test_gradients_are_summed_in_halves_and_the_bias_rides():
    d = design(trained_mlp(), A100, "deep")
    p = next(p for p in d.groups if p.node.pattern == "mlp backward")
    assert {name for name in p.names if p.is_final(name)} == {f"b{i}_{w}.final" for i in (1, 2) for w in ("dw", "db")}
    derivative = p.holder("b2_db")
    assert ops(p, derivative) == ("b2_da", "b2_db") and not p.is_partial(derivative)
    assert p.is_partial(p.holder("b2_dw"))
    size = next(size for q, size in p.passing if q.consumers == ("b2_dw.final",))
    assert size == 4 * 32 * 256  # partial sums are fp32, though the gradient has two bytes an element
    stream = next(q for q, _ in p.passing if q.producer == "b2_da" and len(q.consumers) == 2)
    assert stream.consumers == ("b2_dx", "b2_dw")  # multicast
    # dX and the derivative of the layer before it are one stage: an epilogue.
    assert ops(p, p.holder("b1_da"))[0] == "b2_dx"


def test_a_gradient_with_many_blocks_is_not_split():
    graph = trained_mlp(rows=512, sizes=(2048, 2048, 2048))
    p = next(p for p in design(graph, A100).groups if p.node.pattern == "mlp backward")
    assert not p.is_partial(p.holder("b1_dw")) and "b1_dw" not in p.finals
    (spread,) = p.pipeline.stage("b1_dw").mesh
    assert spread.axes != ("rows",) and spread.size > 1  # CTAs divide the results, and each sees all rows


def test_a_norm_of_five_operators_is_one_kernel():
    d = design(gated_ffn(), A100)
    norm = next(p for p in d.groups if p.node.pattern == "rms norm")
    assert [ops(norm, name) for name in norm.names] == [("square", "mean", "root", "scale", "weigh")]
    ffn = next(p for p in d.groups if p.node.pattern == "gated ffn")
    # The product is the gate's epilogue: what ``up`` makes streams to it.
    assert ops(ffn, "gate") == ("gate", "silu", "product")
    assert {q.producer: q.consumers for q, _ in ffn.passing} == {"up": ("gate",), "gate": ("down",)}


def test_the_pipeline_says_what_is_simulated():
    """CTAs are the replicas of the stages, of which a mesh of their axes can have so many."""
    for graph in (nerf(), trained_mlp()):
        for p in design(graph, A100, "deep").groups:
            simulated = {s.name: s.ctas for s in launch(p, graph, A100).stages}
            assert simulated == {s.name: s.replicas for s in p.pipeline.stages}
            for name, ctas in simulated.items():
                assert ctas in expressible(p, name, tile_of(p), ctas)
            joins = {(q.producer, q.consumers) for q in p.pipeline.queues}
            assert {(q.producer, q.consumers) for q in launch(p, graph, A100).queues} == joins


@pytest.mark.parametrize(("ctas", "most"), [(1, 1), (7, 7), (8, 8), (9, 9), (37, 36), (40, 40), (200, 196)])
def test_ctas_are_those_of_a_mesh(ctas: int, most: int):
    """16 blocks of 128 rows and 16 of 16 columns: of 37 CTAs 12 x 3 have a place, of 200 14 x 14."""
    p = only(design(mlp(rows=2048, sizes=(64, 256, 32)), A100))
    assert expressible(p, "l0", Tile(128, 16), ctas)[-1] == most


def test_an_operator_without_a_lowering_is_in_no_pipeline_and_says_so(monkeypatch):
    from tilestream.studies.kitsune import lowering

    monkeypatch.delitem(lowering.LOWERINGS, torch.ops.aten.relu)
    d = design(mlp(), A100)
    reasons = {e.op: e.reason for e in d.selection.exclusions}
    assert not d.groups and reasons["a0"] == "no tile op does this" and set(reasons) == {op.name for op in mlp()}
    assert simulator.run(d.workload, A100).time_s > 0


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("make", [nerf, mlp, trained_mlp, gated_ffn])
@pytest.mark.every(3)
def test_products_are_conserved_and_traffic_is_what_the_stages_move(make, execution):
    graph = make()
    d = design(graph, A100, execution)
    assert total(d, "tensor_flops") == pytest.approx(graph.flops)
    assert total(d, "dram_read") + total(d, "dram_write") == pytest.approx(d.traffic_bytes)
    assert d.traffic_bytes == traffic(graph, d.units)
    ran = [name for s in d.workload.launches for name in dict.fromkeys(n for x in s.stages for n in x.ops)]
    assert sorted(ran) == sorted(op.name for op in graph)


@pytest.mark.parametrize("device", [A100, H200, devices.get("a100").scale("sms", 2)], ids=lambda d: d.name)
def test_every_stage_has_a_cta_and_no_class_more_than_the_sms(device):
    for graph in (nerf(), trained_mlp()):
        for p in design(graph, device).groups:
            for engine in Engine:
                ctas = [
                    p.pipeline.stage(name).replicas
                    for name in p.names
                    if p.engine(name) is engine and not p.is_final(name)
                ]
                assert all(n >= 1 for n in ctas) and sum(ctas) <= device.sms
            if len(p.names) > 1:
                for s in launch(p, graph, device).stages:
                    assert s.shared_bytes <= device.shared_bytes_per_cta


@pytest.mark.parametrize("sms", [1, 2, 4, 11])
def test_a_pipeline_with_more_stages_than_sms_is_cut(sms: int):
    graph, small = mlp(sizes=(64,) * 8), A100.with_sms(sms)
    made = design(graph, small)
    assert made.fused == design(graph, A100).fused
    for p in made.groups:
        assert all(sum(p.engine(name) is e for name in p.names) <= sms for e in Engine)
    assert run(made.workload, small).time_s > run(design(graph, A100).workload, A100).time_s


def test_long_pipelines_take_no_other_way():
    """The time of a row falls as the fill matters less; nothing jumps where a pipeline gets long."""
    a_row = []
    for rows in (2**15, 2**16, 2**17, 2**18, 2**19):
        made = design(mlp(rows=rows, sizes=(256,) * 5), A100)
        a_row.append(run(made.workload, A100).time_s / rows)
    assert all(b <= 1.02 * a for a, b in zip(a_row, a_row[1:], strict=False))


def test_rings_stay_in_the_l2_where_single_buffers_fit():
    graph = mlp(rows=2**16, sizes=(256,) * 5)
    (p,) = design(graph, A100).groups
    room = {q: launch(p, graph, replace(A100, l2_bytes=q)) for q in (40_000_000, 8_000_000, 100_000)}
    depths = {q: max(x.depth for x in made.queues) for q, made in room.items()}
    assert depths[40_000_000] >= depths[8_000_000]
    assert spilled(room[40_000_000], A100) == 0.0
    tiny = design(graph, replace(A100, name="tiny", l2_bytes=100_000))
    assert tiny.traffic_bytes > design(graph, A100).traffic_bytes


def test_rings_hold_two_steps_of_the_wider_end_and_of_the_longer_way():
    """NeRF's ``alpha`` waits at ``out`` for what passes four stages, those for ``alpha``."""
    p = only(design(nerf(), A100))
    at = {s.name: prod(d.size for d in s.mesh if "rows" in d.axes) for s in p.pipeline.stages}
    late = {"alpha": ("feature", "join", "view", "rgb"), "rgb": ("alpha",)}
    for q in p.pipeline.queues:
        most = 2 * (max(at[n] for n in (q.producer, *q.consumers)) + sum(at[n] for n in late.get(q.producer, ())))
        assert q.depth == min(most, tiles_of(p.pipeline, q, p.pipeline.sizes()))


def test_unknown_execution():
    with pytest.raises(OptionError, match="bulk, vertical, kitsune, deep, whole, mixed"):
        design(mlp(), A100, "spatial")


def test_pipelines_beat_bulk_on_a_chain_of_layers_and_mixed_is_never_worse():
    graph = nerf(65536)
    seconds = {e: simulator.run(design(graph, A100, e).workload, A100).time_s for e in EXECUTIONS}
    assert seconds["kitsune"] < seconds["vertical"] < seconds["bulk"]
    assert seconds["mixed"] <= 1.001 * min(seconds.values())


def test_a_whole_mlp_is_one_kernel_where_one_cta_holds_its_rows():
    made = design(nerf(), A100, "whole")
    p = only(made)
    assert p.vertical and len(p.pipeline.stages) == 1 and not p.pipeline.queues and made.fused == 24
    assert tile_of(p).rows * tile_of(p).columns <= 128 * 256 and p.columns == 256
    (kernel,) = made.workload.launches
    assert kernel == launch(p, made.graph, A100) and kernel.stages[0].shared_bytes <= A100.shared_bytes_per_cta
    wide = design(mlp(sizes=(64, 1024, 1024, 64)), A100, "whole")
    assert not wide.groups and {n.pattern for n in wide.selection.nodes} == {"linear, activation"}


def test_mixed_takes_the_longer_or_the_shorter_backward_pipelines():
    graph = trained_mlp(rows=16384, sizes=(64, 256, 256, 256, 256))
    seconds = {e: simulator.run(design(graph, A100, e).workload, A100).time_s for e in ("kitsune", "deep", "mixed")}
    assert seconds["mixed"] <= 1.001 * min(seconds.values())


def test_the_l2_keeps_what_was_moved_a_short_while_ago():
    small, large = mlp(rows=1024, sizes=(256,) * 4), mlp(rows=262_144, sizes=(256,) * 4)
    for graph, hits in ((small, True), (large, False)):
        plain, kept = design(graph, A100, "bulk"), design(graph, A100, "bulk", reuse=True)
        first, *rest = zip(plain.workload.launches, kept.workload.launches, strict=True)
        assert first[0] == first[1]
        for a, b in rest:
            assert (b.stages[0].work.dram_read < a.stages[0].work.dram_read) == hits
            assert b.stages[0].work.dram_write == a.stages[0].work.dram_write
        assert plain.traffic_bytes == kept.traffic_bytes


def test_mixed_drops_pipelines_that_lose():
    """Two tiny layers: a pipeline takes longer to fill than the two kernels to run."""
    b = Builder()
    h = b.act("a0", b.linear("l0", b.input("x", 64, 64), 64))
    for i in range(1, 6):
        h = b.act(f"a{i}", b.linear(f"l{i}", h, 64))
    graph = b.graph()
    d = design(graph, A100, "mixed")
    assert simulator.run(d.workload, A100).time_s <= simulator.run(design(graph, A100, "bulk").workload, A100).time_s
    assert {e.op for e in d.selection.exclusions} | {n for x in d.selection.nodes for n in x.ops} == {
        op.name for op in graph
    }


def test_tables_are_kernels_of_their_own():
    b = Builder()
    tables = [b.given(f"table{i}", 1000, 64, stored=True) for i in range(2)]
    index = b.given("i", 256, dtype=torch.int64)
    b.cat("joined", *(b.call(f"rows{i}", torch.ops.aten.embedding.default, t, index) for i, t in enumerate(tables)))
    lookups, _ = (graph := b.graph())
    launches = design(graph, A100, "bulk").workload.launches
    assert len(lookups.outputs) == 2 and [x.stages[0].ops for x in launches[:-1]] == [(lookups.name,)] * 2
    moved = sum(s.work.dram_write * s.tiles for x in launches[:-1] for s in x.stages)
    assert moved == pytest.approx(65536)


def test_layers_of_one_shape_get_one_design():
    b = Builder()
    h = b.input("x", 4096, 128)
    for i in range(3):
        h = b.norm(f"n{i}", b.linear(f"m{i}", b.act(f"a{i}", b.linear(f"l{i}", h, 128)), 128))
    first, *others = design(b.graph(), A100).groups
    assert len(others) == 2
    for p in others:
        assert [s.replicas for s in p.pipeline.stages] == [s.replicas for s in first.pipeline.stages]
        assert tile_of(p) == tile_of(first)


@settings(max_examples=40, deadline=None)
@given(random_graphs())
def test_every_design_of_a_random_graph_runs_and_conserves(graph):
    for execution in ("bulk", "vertical", "kitsune"):
        d = design(graph, A100, execution)
        assert total(d, "tensor_flops") == pytest.approx(graph.flops)
        assert total(d, "dram_read") + total(d, "dram_write") == pytest.approx(d.traffic_bytes)
        for x in d.workload.launches:
            assert prod(s.tiles for s in x.stages) > 0
        run = simulator.run(d.workload, A100)  # raises where queues can never give room
        assert run.time_s >= d.traffic_bytes / A100.dram_bytes_per_s


@pytest.mark.parametrize("shape", TILES, ids=str)
@pytest.mark.every(3)
def test_memory_bounds_every_prediction(shape: Tile):
    graph = nerf()
    p = only(design(graph, A100))
    made, work = balanced(p, graph, A100, shape)
    dram, l2 = memory_s(p, work, graph, A100)
    assert predict(p, made, work, graph, A100) > max(dram, l2)
    assert dram == launch_bytes(graph, p.node.ops) / A100.dram_bytes_per_s
    assert works(p, graph, A100, shape, made.by_name(p)) == work


def test_the_page_of_designs_runs(capsys):
    page = (DOCS / "kitsune.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile("".join(blocks), "docs/kitsune.md", "exec"), {})
    *_, last = (out := capsys.readouterr().out).splitlines()
    assert out.startswith("56 of 69 operators in 9 pipelines")
    assert last.startswith("off by") and float(last.split()[-1]) < 0.02
    assert all(f"`{name}`" in page for name in EXECUTIONS)


def test_a_library_kernel_pays_the_measured_gap():
    d = design(mlp(), A100, "bulk")
    assert all(x.launch_s == library_launch("", x.stages[0], A100).launch_s for x in d.workload.launches)

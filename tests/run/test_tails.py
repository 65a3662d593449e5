"""Regions that start one layer later: their tails, when these are timed, what then runs; heads of one column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import HEAD, head, layers_of
from places import DOCS, GOLDEN
from programs import Program
from random_pipelines import tensors_for
from torch import fx, nn

from tilestream import cuda, devices
from tilestream.apps.zoo import mlp
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.graph.selection import Partition, partition
from tilestream.graph.tails import LIBRARY, Tail, tails
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.fits import verify_on
from tilestream.kernels.product.shared_tile import Tail as Exchange
from tilestream.kernels.product.shared_tile import build
from tilestream.kernels.product.sharing import Middle
from tilestream.options import Options
from tilestream.plan import chooser, few_rows
from tilestream.plan.analyse import analyse
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.find import Found
from tilestream.plan.passes.share_tile import share_tile
from tilestream.plan.planner import proposals
from tilestream.plan.tails import all_promising, promising
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.run import ahead, prepare
from tilestream.run import other_ways as run_tails
from tilestream.run.backend import tilestream
from tilestream.run.operator import REGION
from tilestream.run.place import place
from tilestream.run.spec import decode
from tilestream.run.target import Target
from tilestream.run.timer import Timer

aten = torch.ops.aten
H200 = devices.get("h200")
HERE = Target("reference", torch.device("cpu"), H200)
ROWS = 2048


def small_head() -> Pipeline:
    return head(72, 32)


# -- a result of one column


def test_a_result_of_one_column_is_a_shared_tiles_too() -> None:
    p = share_tile(head(), HEAD, H200)
    verify_on(p, H200)
    s = build(p.stages[0], p)
    assert s.block.sizes == (512, 256, 1) and (s.middle_columns, s.out_columns, s.cluster) == (64, 8, 4) and s.alone


def test_the_reference_machine_runs_it() -> None:
    tensors = {n: t.double() for n, t in tensors_for(small_head(), 140, 1).items()}
    hidden = torch.relu(nn.functional.linear(tensors["x"], tensors["w1"], tensors["b1"]))
    want = nn.functional.linear(hidden, tensors["w3"], tensors["b3"])
    (got,) = run_meshes(share_tile(small_head(), replace(HEAD, row_tiles=2)), tensors, FLOAT64, Moved()).values()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def golden_texts() -> dict[str, str]:
    """What ``golden/shared_column.cu`` holds."""
    return {"shared_column.cu": cuda.sources(share_tile(head(), HEAD))[0].text}


def test_text_of_the_kernel() -> None:
    for name, text in golden_texts().items():
        assert text == (GOLDEN / name).read_text(), "if that is meant, write it again: see golden_texts"


@pytest.mark.nvrtc
def test_kernels_compile_without_spills() -> None:
    made = [share_tile(head(), HEAD), *(c.pipeline for c in shared(ROWS) if c.pipeline is not None)]
    assert {r.spills for p in made for r in cuda.compile_only(p)} == {0}


def shared(rows: int) -> list[Candidate]:
    return [c for c in proposals(head(), rows, H200, Options()) if c.strategy == "shared" and c.pipeline is not None]


@pytest.mark.parametrize(("rows", "some"), [(ROWS, True), (8_448, True), (8_449, False)])
def test_heads_are_shared_tiles_where_a_row_stream_has_fewer_tiles_than_there_are_sms(rows: int, some: bool) -> None:
    assert bool(shared(rows)) == some and len(shared(rows)) <= 3


@pytest.mark.parametrize("rows", [16, 128, ROWS])
def test_a_device_without_clusters_has_splits_without(rows: int) -> None:
    """An A100 has none: a model with such a head is planned for it as any other is."""
    a100, options = devices.get("a100"), Options(effort="exhaustive", any_order=True)
    alone = Program("alone", "bf16")
    alone.store(alone.linear(alone.load("x", 4096), 256, "relu"))
    for program in (head(), alone.build()):
        splits = few_rows.best_splits(program, rows, a100, options)
        assert all(s.tail is not Exchange.CLUSTER and s.middle is not Middle.DSM for s in splits)
    x = torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        made = analyse(mlp([1024, 512, 256, 1], nn.ReLU).bfloat16().to("meta"), (x,), Options(device="a100"))
    assert made.predicted_us and made.inductor_predicted_us


# -- tails


def regions(sizes: Sequence[int], rows: int) -> tuple[fx.GraphModule, Partition]:
    with torch.no_grad():
        model = mlp(list(sizes), nn.ReLU).bfloat16().eval()
        (graph,) = capture(model, (torch.randn(rows, sizes[0]).bfloat16(),)).graphs
    return graph, partition(graph, projections=True)


def layers(region: Region) -> list[int]:
    return layers_of(region.program)


def test_tails_of_a_chain() -> None:
    _, found = regions([64, 48, 40, 40, 24, 8], 600)
    assert [layers(t.region) for t in tails(found.regions[0])] == [[40, 40, 24, 8], [24, 8]]


def test_the_example_of_the_page() -> None:
    page = (DOCS / "wide-layers.md").read_text()
    exec(compile(page.split("```python\n", 1)[1].split("```", 1)[0], "docs/wide-layers.md", "exec"), {})


def test_what_is_no_chain_has_no_tails() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.both = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.both(self.one(x).relu() * self.two(x).relu())

    with torch.no_grad():
        (graph,) = capture(Beside().bfloat16().eval(), (torch.randn(600, 64).bfloat16(),)).graphs
    (region,) = partition(graph).regions
    assert list(tails(region)) == []


@pytest.mark.parametrize(
    ("sizes", "rows", "want"),
    [
        ([1024, 512, 256, 1], ROWS, [256, 1]),  # as DLRM's top MLP ends
        ([768, 512, 128, 16], ROWS, [128, 16]),
        ([1024, 512, 256, 1], 32_768, None),  # a row stream has tiles for all SMs
        ([1024, 512, 256, 1], 512, None),  # another kernel's
        ([64, 64, 64, 3], ROWS, None),  # no layer that a library would spread further
    ],
)
@pytest.mark.every(2)
def test_which_tails_are_promising(sizes: list[int], rows: int, want: list[int] | None) -> None:
    found = [promising(r, Options(), H200) for r in regions(sizes, rows)[1].regions]
    assert [layers(t.region) for t in found if t is not None] == ([want] if want else [])


def test_explain_tells_of_it_by_prediction() -> None:
    """Libraries' products have their ReLUs beside a pipeline; of Inductor alone they are kernels of their own."""
    with torch.no_grad():
        told = analyse(mlp([1024, 512, 256, 1], nn.ReLU).bfloat16().eval(), (torch.randn(ROWS, 1024).bfloat16(),))
    (region,) = told.regions
    assert layers_of(region.program) == [256, 1] and region.plan is not None
    assert [e.reason for e in told.exclusions] == [LIBRARY] * 2
    assert [launch.operators for launch in told.whole.launches] == [
        ("aten.addmm.default",),
        ("aten.addmm.default", "aten.relu.default", "aten.addmm.default"),
    ]
    assert sum("aten.relu.default" in launch.operators for launch in told.on_inductor.launches) == 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every pipeline takes 10 us by measurement, and a library with a tail what this list says."""
    split_us: list[float] = [9.0]

    def times(_: Timer, candidates: Sequence[Candidate]) -> list[float]:
        tail = any(c.strategy == run_tails.TAIL for c in candidates)
        library_us = 10.0 if tail else 20.0  # beside a tail the fallback is what the region's plan chose
        return [split_us[0] if c.strategy == run_tails.TAIL else library_us if c.strategy == FALLBACK else 10.0
                for c in candidates]  # fmt: skip

    monkeypatch.setattr(prepare, "measures", lambda *_: True)
    monkeypatch.setattr(Timer, "__call__", times)
    monkeypatch.setattr(ahead, "begin", lambda *_: None)
    return split_us


@pytest.mark.parametrize(("split_us", "later"), [(9.0, True), (9.95, False), (RuntimeError("does not run"), False)])
def test_a_region_starts_later_where_that_is_faster(
    measured: list[Any], tmp_path: Path, split_us: Any, later: bool, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    graph, part = regions([1024, 512, 256, 1], ROWS)
    found = Found(part.cuts, part.exclusions, part.operators, graph, "inference")
    options = Options(cache_dir=str(tmp_path))
    measured[0] = split_us
    want = [[256, 1]] if later else [[512, 256, 1]]
    shorter = all_promising(found, options, H200)
    assert [layers(t.region) for t in shorter.values()] == [[256, 1]]
    assert [layers(r) for r in found.with_tails(run_tails.faster(found, shorter, options, HERE)).regions] == want
    measured[0] = 1e3 if later else 0.0  # the next process believes what this one has found
    chooser.forget()
    (cut,) = found.with_tails(run_tails.faster(found, shorter, options, HERE)).cuts
    assert [layers(cut.region)] == want
    assert {*cut.nodes} <= {*graph.graph.nodes} and cut.region.name == found.regions[0].name


def test_the_graph_that_is_timed_has_the_librarys_epilogue(fresh: None) -> None:
    _, found = regions([96, 72, 32, 1], 140)
    (region,) = found.regions
    (tail,) = tails(region)
    values = arguments(region.graph)
    want = region.graph(*values)
    made = run_tails.split(tail, pipeline_of(tail.region), Options(), "reference")
    (call,) = made.graph.find_nodes(op="call_function", target=REGION)
    assert len(made.graph.find_nodes(op="call_function", target=aten._addmm_activation.default)) == 1
    assert not made.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert decode(str(call.args[2])).pipeline.strategy == "shared tile"
    torch.testing.assert_close(made(*values), want, rtol=0.05, atol=0.02)


def test_the_whole_graph_computes_the_same_with_a_region_that_starts_later(fresh: None) -> None:
    graph, found = regions([96, 72, 32, 1], 140)
    values = arguments(graph)
    want = graph(*values)
    (tail,) = tails(found.regions[0])
    cut = tail.within(graph.graph)
    assert cut is not None
    (placed,) = place(graph, Partition((cut,), (), 0), pipeline_of, "reference")
    assert layers(placed) == [32, 1] and len(graph.graph.find_nodes(op="call_function", target=REGION)) == 1
    torch.testing.assert_close(graph(*values), want, rtol=0.05, atol=0.02)


def pipeline_of(region: Region) -> Pipeline:
    return share_tile(region.program, replace(HEAD, row_tiles=2))


def arguments(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Values for the graph's arguments; weights of order one over the root of their depth."""
    fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    return [torch.randn(v.shape).to(v.dtype) / v.shape[-1] ** 0.5 for v in fakes]


def test_a_compilation_asks_for_it(measured: list[float], fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def seen(found: Partition, later: Mapping[str, object], *_: object) -> dict[str, Tail]:
        asked.extend([*layers(r), *later] for r in found.regions)
        return {}

    monkeypatch.setattr(run_tails, "faster", seen)
    model = mlp([96, 72, 32, 1], nn.ReLU).bfloat16().eval()
    with torch.no_grad():
        torch.compile(model, backend=tilestream, options={"target": "reference", "cache": False})(
            torch.randn(140, 96).bfloat16()
        )
    assert asked == [[72, 32, 1]], "140 rows: no tails"

"""Rows that come through an index: the IR, the front end, the reference machine, and the kernels on the host."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gathers import everywhere, message, tensors, with_index
from places import DOCS
from programs import Program
from torch import Tensor, nn

from tilestream import reference
from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.devices import get
from tilestream.errors import InputError, VerifyError
from tilestream.graph.capture import capture
from tilestream.graph.selection import ADDED_GATHER, partition
from tilestream.ir.pipeline import Pipeline, Residency, Role, Shard, Tile, TileOp
from tilestream.ir.pipeline import Tensor as Declared
from tilestream.ir.plain import plain
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.ir.text import show
from tilestream.ir.traffic import dram_of, traffic
from tilestream.ir.verify import verify
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.emit import emit
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.kernels.stream.tables import GATHERED
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.reference.whole import run_whole
from tilestream.report.facts import summary
from tilestream.run import oracle, prepare
from tilestream.run.backend import tilestream
from tilestream.run.made_up import random_arguments
from tilestream.run.spec import decode, encode, spec_of

# -- the IR


def test_text_and_json() -> None:
    p = message()
    verify(p)
    assert "load1: 128 bf16 = load(v, senders)" in show(p)
    assert "input senders [rows] i64" in show(p)
    assert summary(p.stages[0], p).startswith("load 128, gather 128 (x2), cat, linear 384>128")
    assert pipeline_from_json(pipeline_to_json(p)) == p


def test_written_out_it_is_a_view_through_an_index() -> None:
    p = message(64, 2)
    assert "load1[rows,load1.c]:bf16 = load v[senders[rows],load1.c]" in show(plain(p))
    given = tensors(p, 100)
    given |= {n: given[n] % 37 for n in ("senders", "receivers")}  # in that form nothing counts from the end
    got, want = run_meshes(plain(p), given, FLOAT64), reference.run(p, given, precision="float64")
    torch.testing.assert_close(got["y10"], want["y10"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v": Declared.table("v", None, 9, "bf16")}, r"9 x 2 = 18 bytes, no multiple of 16"),
        ({"v": Declared.of("v", Role.PARAMETER, (16,), "bf16")}, r"table 'v' has 1 dimensions"),
        ({"v": Declared.table("v", None, 24, "bf16")}, r"tile 'load0' has 16 features, but table 'v' of 24"),
        ({"i": Declared.of("i", Role.INPUT, (1,), "bf16")}, r"index 'i' is bf16"),
        ({"i": Declared.of("i", Role.INPUT, (2,), "i64")}, r"index 'i' has 2 dimensions"),
        ({"i": Declared.of("i", Role.PARAMETER, (), "bf16")}, r"uses parameter 'i' where only an input"),
    ],
)
def test_what_is_refused(change: dict[str, Declared], says: str) -> None:
    p = Program("small")
    p.store(p.linear(p.gather("v", "i", 16), 8))
    built = p.build()
    with pytest.raises(VerifyError, match=says):
        verify(replace(built, tensors=tuple(change.get(t.name, t) for t in built.tensors)))


def test_indices_are_no_rows() -> None:
    p = Program("small")
    p.tensor("y", Role.OUTPUT, 1)
    p.gather("v", "i", 16)
    built = p.build()
    load = TileOp("load", Tile.of("x", 1, "bf16"), (), ("i",))
    store = TileOp("store", None, ("x",), ("y",))
    with pytest.raises(VerifyError, match="loads 'i' of dtype i64 as rows"):
        verify(built.with_stages((replace(built.stages[0], ops=(load, store)),)))


def test_a_table_is_read_from_dram_once_and_its_rows_from_the_l2() -> None:
    p, rows, nodes = message(), 1000, 50
    sized = replace(
        p, tensors=tuple(Declared.table("v", nodes, 128, "bf16") if t.name == "v" else t for t in p.tensors)
    )
    assert dram_of(sized, rows)[0] | {} == {
        **dram_of(p, rows)[0],
        "v": nodes * 256,
        "senders": rows * 8,
        "receivers": rows * 8,
    }
    assert dram_of(p, rows)[0]["v"] == rows * 256  # its size is read at the call: at most what is taken
    assert dram_of(sized, 10)[0]["v"] == 10 * 256
    by_hand = traffic(message_of_inputs(), rows)
    assert traffic(sized, rows).l2 == by_hand.l2 + 2 * rows * 8


def message_of_inputs() -> Pipeline:
    """The same with rows that were gathered before."""
    p = Program("message128")
    e, a, b = (p.load(n, 128) for n in ("e", "a", "b"))
    h = p.cat(e, a, b)
    for layer in range(3):
        h = p.linear(h, 128, "relu" if layer < 2 else "")
    p.store(p.op("add", 128, e, p.layer_norm(h)))
    return p.build()


def test_a_loader_warp_has_its_time() -> None:
    """For as many chunks as its table says, which it copies beside the products."""
    for p in (message(), everywhere()):
        told = sum(op[0] == GATHERED for op in emit(p).tables.load_ops)
        schedule = build(p.stages[0], p)
        assert sum(schedule.streams[tile].index != "" for tile, _ in schedule.chunks()) == told > 0
    device, before = get("h200"), message_of_inputs()
    with_gathers, without = (stage_cost(p.stages[0], p, device) for p in (message(), before))
    assert without.step_s < with_gathers.step_s < without.step_s + with_gathers.step["inputs"].seconds


# -- meaning


def test_below_zero_counts_from_the_end() -> None:
    p = everywhere()
    given = tensors(p, 70)
    wrapped = given | {n: given[n] % least for n, least in (("i", 37), ("j", 37))}
    wrapped["i"] = torch.where(given["i"] < 0, given["i"] + 37, given["i"])
    heights = {"a": 50, "b": 37}
    for machine in (reference.run, run_whole):
        got = machine(p, given)["y9"]
        by_hand = given["c"][given["j"]] * torch.relu(_everywhere(given, heights))
        torch.testing.assert_close(got, by_hand, rtol=0.02, atol=0.02)


def _everywhere(given: dict[str, Tensor], heights: dict[str, int]) -> Tensor:
    a, b = (given[n][given["i"] % heights[n]].float() for n in ("a", "b"))
    weights = [given[n].float() for n in given if n[0] == "w"]
    biases = [given[n].float() for n in given if n[0] == "b" and n != "b"]
    h = nn.functional.silu(torch.cat([a[:, 16:56], b], 1) @ weights[0].T + biases[0]) + b[:, 64:128]
    return h @ weights[1].T + biases[1]


@pytest.mark.parametrize("bad", [37, -38, 2**40])
def test_outside_of_the_table(bad: int) -> None:
    p = message(64, 2)
    given = tensors(p, 100)
    given["senders"][70] = bad
    with pytest.raises(InputError, match=rf"index 'senders' is {bad} where table 'v' has 37 rows"):
        reference.run(p, given)


def test_the_example_of_the_page_runs() -> None:
    page = (DOCS / "message-passing.md").read_text()
    example = page.split("```python")[1].split("```")[0]
    exec(compile(example, "docs/message-passing.md", "exec"), {})


# -- kernels on the host

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_gcc
@pytest.mark.parametrize(
    ("case", "placement"), [("everywhere", 0), ("everywhere", 1), ("i32", 0), ("f32", 1), ("resident", 0)]
)
@pytest.mark.every(2)
def test_kernels_on_the_host(case: str, placement: int, folder: Path) -> None:
    p = {
        "everywhere": everywhere,
        "i32": lambda: with_index(message(64, 2), "i32"),
        "f32": lambda: message(32, 2, dtype="f32"),
        "resident": lambda: message(64, 2),
    }[case]()
    residency = Residency.RESIDENT if case == "resident" else Residency.STREAMED
    p = p.with_stages((p.stages[0].with_(placement=Shard(placement), residency=residency),))
    given = tensors(p, 300)
    got = run_on_host(p, given, HostRun(folder=folder))
    exact, working = reference.run(p, given, precision="float64"), reference.run(p, given)
    for name, value in got.items():
        norm = exact[name].norm()
        error, own = ((x.double() - exact[name]).norm() / norm for x in (value, working[name]))
        assert error <= 2 * own + (2**-9 if case == "f32" else 1e-4)


@needs_gcc
def test_the_host_says_which_index_names_no_row(folder: Path) -> None:
    p = message(64, 2)
    given = tensors(p, 100)
    given["receivers"][99] = 37
    with pytest.raises(InputError, match=r"index 'receivers' is 37 at row 99, and table 'v' has 37 rows"):
        run_on_host(p, given, HostRun(folder=folder))


def test_kernels_without_gathers_say_nothing_of_them() -> None:
    assert "GATHERS" in emit(message()).text
    assert "GATHERS" not in emit(message_of_inputs()).text


# -- the front end


class Edges(nn.Module):
    """Messages along edges by ``x[index]``; ``how`` says what else is done with gathered rows."""

    def __init__(self, how: str = "", width: int = 32) -> None:
        super().__init__()
        self.how = how
        self.net = nn.Sequential(nn.Linear(2 * width, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, v: Tensor, i: Tensor, j: Tensor) -> Any:
        a, b = v[i], v.index_select(0, j)
        y = self.net(torch.cat([a, b], -1))
        return (y, a) if self.how == "shared" else y


def regions_of(module: nn.Module, *inputs: Any) -> tuple[Any, ...]:
    return partition(capture(module, inputs).graphs[0]).cuts


def loads(region: Any) -> int:
    return sum(bool(op.index) for op in region.program.stages[0].ops)


def given(
    width: int = 32, nodes: int = 40, edges: int = 150, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(nodes, width).bfloat16(), *torch.randint(nodes, (2, edges))


@pytest.mark.smoke
def test_gathers_join_the_region_that_alone_uses_them() -> None:
    (cut,) = regions_of(Edges().bfloat16(), *given())
    assert loads(cut.region) == 2
    (cut,) = regions_of(Edges("shared").bfloat16(), *given())
    assert loads(cut.region) == 1  # the other's rows are wanted in memory as well


class Spread(nn.Module):
    """A gradient that comes along edges, added to what is there: ``what`` says which results are the graph's."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.net = what, nn.Linear(32, 16)

    def forward(self, v: Tensor, i: Tensor, e: Tensor) -> Any:
        total = e + v[i].expand(len(i), 32)
        y = torch.relu(self.net(total))
        return (y, total) if self.what == "both" else y


@pytest.mark.parametrize(("what", "backward", "inside"), [("both", True, 0), ("both", False, 1), ("one", True, 1)])
def test_a_gather_for_a_sum_that_leaves_anyway(what: str, backward: bool, inside: int) -> None:
    v, i, _ = given()
    graph = capture(Spread(what).bfloat16(), (v, i, torch.randn(150, 32).bfloat16())).graphs[0]
    found = partition(graph, backward=backward)
    (region,) = found.regions
    assert loads(region) == inside
    out = [e.op for e in found.exclusions if e.reason == ADDED_GATHER]
    assert out == ([] if inside else ["aten.index.Tensor", "aten.add.Tensor"])


def test_wide_rows_are_gathered_outside() -> None:
    found = partition(capture(Edges(width=256).bfloat16(), given(256)).graphs[0])
    assert found.regions and not any(loads(r) for r in found.regions)
    assert any("a kernel of its own is faster" in e.reason for e in found.exclusions)


@pytest.mark.parametrize("width", [3, 20])
def test_rows_that_cannot_be_copied_stay_outside(width: int) -> None:
    found = partition(capture(Edges(width=width).bfloat16(), given(width)).graphs[0])
    assert not any(loads(r) for r in found.regions)
    assert any(f"rows of {2 * width} bytes" in e.reason for e in found.exclusions)


def test_random_arguments_take_rows_from_all_over_the_table() -> None:
    (cut,) = regions_of(Edges().bfloat16(), *given())
    integers = [v for v in random_arguments(cut.region) if not v.is_floating_point()]
    assert len(integers) == 2 and all(len(v.unique()) > 20 and v.max() < 40 for v in integers)


def test_a_spec_survives_its_text() -> None:
    (cut,) = regions_of(Edges().bfloat16(), *given())
    spec = spec_of(cut.region, cut.region.program, "reference")
    assert decode(encode(spec)) == spec


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend=tilestream, options={"target": "reference"}, **options)


def check(module: nn.Module, fast: Any, *inputs: Tensor) -> None:
    with torch.no_grad():
        got, eager = fast(*inputs), module(*inputs)
        exact = module.double()(*[x.double() if x.is_floating_point() else x for x in inputs])
        module.bfloat16()
    error, own, good = oracle.judge([got], [eager], [exact])
    assert good, f"error {error:.2e}, eager's {own:.2e}"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    module = Edges().bfloat16()
    fast = compiled(module, dynamic=dynamic)
    for nodes, edges in ((40, 150), (33, 90)):
        v, i, j = given(nodes=nodes, edges=edges)
        check(module, fast, v, i - nodes * (i % 2), j.int())
    assert prepare.analyses() and all(a.plan is not None for a in prepare.analyses())


@pytest.mark.usefixtures("fresh")
def test_embedding_of_two_dimensions() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(50, 64), nn.Linear(64, 24)

        def forward(self, ids: Tensor) -> Tensor:
            return torch.relu(self.out(self.words(ids)))

    module = Words().bfloat16()
    check(module, compiled(module), torch.randint(50, (5, 30)))
    assert any("aten.embedding.default" in a.operators for a in prepare.analyses())


@pytest.mark.usefixtures("fresh")
def test_gradients() -> None:
    """The gathered rows are saved, for the weights' gradients: the region reads them, and all gradients are right."""
    module = Edges().bfloat16()
    v, i, j = given()
    results = []
    for function in (module, compiled(module)):
        module.zero_grad(set_to_none=True)
        leaf = v.clone().requires_grad_()
        function(leaf, i, j).float().square().sum().backward()
        results.append([leaf.grad, *[p.grad for p in module.parameters()]])
    assert prepare.analyses()
    for ours, eager in zip(*reversed(results), strict=True):
        assert ours is not None and eager is not None
        assert (ours.double() - eager.double()).norm() < 0.02 * eager.double().norm()

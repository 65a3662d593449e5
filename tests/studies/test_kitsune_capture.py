"""Models as operators: the paper's counts, and FLOPs and bytes against independent counts."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DOCS
from table2_graphs import published
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tilestream.apps import APPS
from tilestream.apps.models import MODELS
from tilestream.errors import CaptureError, OptionError
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.capture import capture
from tilestream.studies.kitsune.compiler.operators import Kind, OperatorGraph
from tilestream.studies.kitsune.record import record

TABLE_2 = {
    ("dlrm", "inference"): 21,
    ("graphcast_cut", "inference"): 35,
    ("mgn", "inference"): 51,
    ("nerf", "inference"): 24,
    ("llama_prefill", "inference"): 27,
    ("llama_decode", "inference"): 27,
    ("dlrm", "training"): 59,
    ("graphcast_cut", "training"): 101,
    ("mgn", "training"): 148,
    ("nerf", "training"): 69,
    ("llama_prefill", "training"): 88,
}
"""Operators of each row of the paper's Table 2."""

pytestmark = pytest.mark.xdist_group("kitsune")  # one process has what is captured


@pytest.fixture(scope="module")
def graphs() -> dict[tuple[str, str], OperatorGraph]:
    return {(name, mode): published(name, mode) for name, mode in TABLE_2}


@pytest.mark.parametrize(("name", "mode"), TABLE_2)
def test_as_many_operators_as_the_paper(graphs: dict, name: str, mode: str) -> None:
    assert len(graphs[name, mode]) == TABLE_2[name, mode]


@pytest.mark.parametrize(("name", "mode"), TABLE_2)
def test_every_graph_is_well_formed(graphs: dict, name: str, mode: str) -> None:
    graph = graphs[name, mode]
    for op in graph:
        assert op.bytes_read + op.bytes_written > 0 and op.source, op
        assert (op.flops > 0) == (op.engine is Engine.TENSOR) == (op.kind in (Kind.LINEAR, Kind.BMM, Kind.ATTENTION))
        for operand in op.inputs:
            assert 0 <= operand.bytes <= graph.values[operand.value].bytes + 1e-6
            assert operand.bytes <= operand.touched + 1e-6
        for value, size in zip(op.outputs, op.output_bytes, strict=True):
            assert size <= graph.values[value].bytes
            assert graph.consumers(value) or graph.values[value].is_output, f"{value} is dead"
    assert any(v.is_output for v in graph.values.values())
    assert {op.phase for op in graph} == ({"forward", "backward"} if mode == "training" else {"forward"})
    assert [op.phase for op in graph] == sorted((op.phase for op in graph), reverse=True)


@pytest.mark.parametrize("name", ["nerf", "dlrm", "mgn", "graphcast_cut", "llama_prefill"])
def test_inference_is_the_forward_part_of_training(graphs: dict, name: str) -> None:
    both = [graphs[name, "training"].phase("forward"), capture(name, **MODELS[name].training_cut).operators]
    assert [(op.label, op.flops) for op in both[0]] == [(op.label, op.flops) for op in both[1]]


@pytest.mark.parametrize("name", ["nerf", "mgn", "llama_prefill", "llama_prefill+sdpa"])
def test_flops_are_those_that_pytorch_counts(name: str) -> None:
    small = {
        "layers": 2,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 96,
        "vocabulary": 100,
        "tokens": 9,
        "batch": 1,
    }
    changes = {"nerf": {"rows": 50}, "mgn": {"nodes": 20, "edges": 60}}.get(name, small)
    module, inputs = MODELS[name].make(training=True, cut=True, device="cpu", dtype=torch.float32, **changes)
    with FlopCounterMode(display=False) as counter:
        out = module(*inputs)
        sum(x.sum() for x in (out if isinstance(out, tuple) else (out,))).backward()
    counted = counter.get_total_flops()
    if name.endswith("sdpa"):  # the counter knows no fused attention on the CPU: forward 4, backward 10 for a score
        counted += 2 * 14 * 4 * 9 * 9 * 16
    assert capture(name, mode="training", **changes).flops == counted


@pytest.mark.parametrize("name", ["siren", "policy_value", "gated_ffn", "mixer", "two_tower", "classifier"])
def test_flops_of_other_models_are_those_that_pytorch_counts(name: str) -> None:
    module, inputs = APPS[name].make(32)
    module.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        sum(x.sum() for x in tree_leaves(module(*inputs))).backward()
    assert capture(module, inputs, "training").flops == counter.get_total_flops()


def test_bytes_of_nerf_are_the_sum_over_its_layers(graphs: dict) -> None:
    rows, at = 10240, 2
    linears = [(63, 256), *[(256, 256)] * 4, (319, 256), (256, 256), (256, 256)]
    linears += [(256, 1), (256, 256), (283, 128), (128, 3)]
    total = sum(rows * (i + o) + i * o + o for i, o in linears)  # input, output, weight, bias
    total += sum(2 * rows * n for n in [256] * 8 + [128])  # ReLU
    total += sum(2 * rows * n for n in (63 + 256, 256 + 27, 3 + 1))  # concatenations
    assert graphs["nerf", "inference"].bytes == at * total


def test_a_lookup_reads_its_rows_and_its_gradient_is_rows() -> None:
    graph = capture("dlrm", mode="training", batch=64)
    lookup = next(op for op in graph if op.label == "embedding")
    tables = [o for o in lookup.inputs if graph.values[o.value].is_parameter]
    assert len(tables) == len(lookup.outputs) == 26
    assert max(o.bytes for o in tables) == 64 * 128 * 2 < graph.values[tables[0].value].bytes
    gradient = next(op for op in graph if op.label == "embedding backward")
    assert max(gradient.output_bytes) == 64 * 128 * 2


def test_a_gather_reads_nodes_once_from_memory_and_once_an_edge_from_l2() -> None:
    gather = next(op for op in capture("mgn", nodes=30, edges=200, batch=1) if op.label == "gather-cat")
    assert sorted(o.bytes for o in gather.inputs) == [200 * 8, 200 * 8, 30 * 256, 30 * 256, 200 * 256]
    assert sorted(o.touched for o in gather.inputs)[2:] == [200 * 256] * 3
    assert gather.bytes == 2 * 200 * 8 + (30 + 200) * 256 + 3 * 200 * 256


def test_a_bag_reads_and_writes_its_rows() -> None:
    with torch.device("meta"):
        bag, indices = nn.EmbeddingBag(1000, 8, mode="sum"), torch.empty(5, 3, dtype=torch.int64)
    graph = capture(bag, (indices,), "training")
    lookup, gradient = (next(op for op in graph if op.label == label) for label in ("embedding", "embedding backward"))
    assert [o.bytes for o in lookup.inputs if graph.values[o.value].is_parameter] == [15 * 8 * 4]
    assert gradient.output_bytes == (15 * 8 * 4,) and gradient.simt_ops == lookup.simt_ops == 15 * 8


def test_what_fits_no_family_is_kept_apart() -> None:
    class Scans(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.erfc(x.cumsum(0).sort(-1)[0])

    found = [(op.label, op.kind) for op in capture(Scans(), (torch.randn(4, 4),))]
    assert found == [("cumsum", Kind.OTHER), ("sort", Kind.OTHER), ("erfc", Kind.ELEMENTWISE)]


def test_the_three_gradients_of_a_layer(graphs: dict) -> None:
    graph = graphs["nerf", "training"]
    labels = [op.label for op in graph.phase("backward")]
    found = {label: labels.count(label) for label in set(labels)}
    assert found == {"linear dW": 12, "linear db": 12, "linear dX": 11, "relu backward": 9, "add": 1}
    weights = [op for op in graph if op.label == "linear dW"]
    assert all(op.over_rows and op.reduced == 10240 for op in weights)
    assert {op.gemm for op in weights} >= {(1, 256, 63, 10240), (1, 3, 128, 10240)}
    assert all(graph.values[v].is_output for op in weights for v in op.outputs)


def test_what_the_backward_graph_reads_is_saved(graphs: dict) -> None:
    graph = graphs["nerf", "training"]
    saved = {v.name for v in graph.values.values() if v.saved}
    assert {graph.producer(v).label for v in saved} == {"relu", "cat"}  # inputs of layers, and signs of ReLU
    assert not any(v.saved for v in graphs["nerf", "inference"].values.values())


def test_a_cache_is_read_and_only_its_new_row_written() -> None:
    graph = capture("llama_decode", context=99)
    scores = next(op for op in graph if op.label == "bmm")
    cache = next(o for o in scores.inputs if graph.values[o.value].is_input)
    row = 8 * 128 * 2
    assert cache.bytes == pytest.approx(99 * row)
    assert sum(o.bytes for o in scores.inputs) == pytest.approx(100 * row + 32 * 128 * 2)
    assert sum(o.touched for o in scores.inputs) > sum(o.bytes for o in scores.inputs) - 1
    written = {v.name: v.bytes for v in graph.values.values() if v.is_output}
    assert sorted(written.values()) == [row, row, 4096 * 2]


def test_rotation_in_complex_numbers_lies_in_memory_as_bf16() -> None:
    graph = capture("llama_prefill", batch=1, tokens=8)
    turned = [v for v in graph.values.values() if v.shape == (1, 8, 32, 128)]
    assert [v.bytes for v in turned] == [8 * 4096 * 2]


def test_whole_models_have_all_their_layers() -> None:
    one, two = (len(capture("llama_prefill", cut=False, layers=n)) for n in (1, 2))
    assert two - one == 27
    assert len(capture("mgn", cut=False, steps=3)) == 12 + 3 * 17 + 5 - 1  # nobody reads the last block's edges
    assert len(capture("graphcast_small", cut=False, steps=2)) == 20 + 12 + 5 + 25 + 12 + 3


def test_grouping_only_what_feeds_one_operator() -> None:
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            a = x.index_select(0, i)
            return torch.cat([a, x.index_select(0, i + 1)], 1) + torch.cat([a, a], 1)

    graph = capture(Shared(), (torch.randn(9, 4), torch.arange(5)))
    assert [op.label for op in graph] == ["gather", "add", "gather-cat", "cat", "add"]


def test_scaling_belongs_to_a_product_that_nothing_else_reads() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = x @ y
            probabilities = torch.softmax(scores * 0.5, -1)
            return probabilities + scores if self.shared else probabilities

    for shared, expected in ((False, ["bmm", "softmax"]), (True, ["bmm", "mul", "softmax", "add"])):
        module = Scaled()
        module.shared = shared
        graph = capture(module, (torch.randn(2, 4, 4), torch.randn(2, 4, 4)))
        assert [op.label for op in graph] == expected


@settings(max_examples=10, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    rows=st.integers(1, 50),
    bias=st.booleans(),
    activation=st.sampled_from([nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid]),
)
def test_random_chains(widths: list[int], rows: int, bias: bool, activation: type[nn.Module]) -> None:
    layers = [m for a, b in zip(widths, widths[1:], strict=False) for m in (nn.Linear(a, b, bias), activation())]
    graph = capture(nn.Sequential(*layers), (torch.randn(rows, widths[0]),), "training")
    n = len(widths) - 1
    assert len(graph.phase("forward")) == 2 * n
    assert len(graph.phase("backward")) == n + (3 if bias else 2) * n - 1
    products = sum(2 * rows * a * b for a, b in zip(widths, widths[1:], strict=False))
    assert graph.flops == 3 * products - 2 * rows * widths[0] * widths[1]
    forward = sum(op.bytes for op in graph.phase("forward"))
    pairs = zip(widths, widths[1:], strict=False)
    assert forward == 4 * sum(rows * (a + b) + a * b + bias * b + 2 * rows * b for a, b in pairs)


def test_a_module_of_any_device_is_left_as_it_is() -> None:
    module = nn.Linear(4, 4)
    before = {n: (p, p.clone()) for n, p in module.named_parameters()}
    capture(module, (torch.randn(3, 4),), "training")
    for name, p in module.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1]) and p.grad is None


class Joined(nn.Module):
    """Every parameter has a shape of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(12, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.second(torch.cat([torch.tanh(self.first(x)), x], -1)))


def test_the_recorded_graphs_compute_what_eager_computes() -> None:
    module, x, tangent = Joined(), torch.randn(6, 5), torch.randn(6, 9)
    recorded = record(module, (x,), "training")
    given = {tuple(t.shape): t for t in (x, *module.parameters())}

    def run(graph: torch.fx.Graph, known: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        places = [n for n in graph.nodes if n.op == "placeholder"]
        arguments = [known[n.name] if n.name in known else given[tuple(n.meta["val"].shape)] for n in places]
        return list(torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*arguments))

    with torch.no_grad():
        results = run(recorded.forward, {})
        names = [n.name for n in next(n for n in recorded.forward.nodes if n.op == "output").args[0]]
        assert len(results) == 1 + recorded.saved
        grads = run(recorded.backward, {**dict(zip(names, results, strict=True)), "tangents_1": tangent})
    expected = module(x)
    expected.backward(tangent)
    torch.testing.assert_close(results[0], expected)
    found = {tuple(g.shape): g for g in grads if g is not None}
    assert len(found) == 4
    for parameter in module.parameters():
        torch.testing.assert_close(found[tuple(parameter.shape)], parameter.grad)


def test_a_weight_that_is_used_twice_is_one_value() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return F.linear(self.table(i), self.table.weight)

    graph = capture(Tied(), (torch.randint(50, (4,)),), "training")
    assert sum(v.is_parameter for v in graph.values.values()) == 1
    assert [op.label for op in graph] == [
        *("embedding", "linear", "linear dW", "linear dX", "embedding backward", "add"),
    ]


def test_a_table_that_is_looked_up_twice_has_two_gradients_to_add() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(50, 8), nn.Embedding(60, 8)

        def forward(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.user(i), self.user(j), self.item(j)], 1)

    indices = torch.randint(50, (4,)), torch.randint(50, (4,))
    labels = [op.label for op in capture(Pair(), indices, "training")]
    assert labels[:2] == ["embedding", "stack"] and sorted(labels[2:]) == ["add"] + 3 * ["embedding backward"]


def test_reductions_say_over_what() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.sum(0), x.mean(-1), F.layer_norm(x, x.shape[-1:]), x.sum()

    graph = capture(Sums(), (torch.randn(300, 7),))
    found = [(op.kind, op.reduced, op.over_rows) for op in graph]
    expected = [(Kind.REDUCTION, 300, True), (Kind.REDUCTION, 7, False), (Kind.NORM, 7, False)]
    assert found == [*expected, (Kind.REDUCTION, 2100, True)]


def test_tiles_of_products_cover_their_output() -> None:
    for op in capture("nerf", rows=1000):
        if op.gemm is not None:
            _, m, n, _ = op.gemm
            assert op.tiles == -(-m // 128) * -(-n // 128)
        else:
            assert op.tiles == -(-prod((op.rows, 1)) * int(op.bytes_written / 2 / op.rows) // 16384)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_errors_say_what_and_how() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(CaptureError, match="Branches could not be captured.*does not branch on data"):
        capture(Branches(), (x,))
    with pytest.raises(CaptureError, match="convolution.*work is known"):
        capture(nn.Conv2d(3, 3, 3), (x,))
    with pytest.raises(CaptureError, match="nothing of the model takes gradients"):
        capture(nn.ReLU(), (x,), "training")
    with pytest.raises(CaptureError, match="computes nothing"):
        capture(nn.Flatten(), (x,))
    with pytest.raises(CaptureError, match="no inputs"):
        capture(nn.ReLU())
    with pytest.raises(CaptureError, match="named model was given inputs"):
        capture("nerf", (x,))
    with pytest.raises(CaptureError, match="mode is 'train'"):
        capture("nerf", mode="train")
    with pytest.raises(OptionError, match="did you mean 'rows'"):
        capture("nerf", row=3)


def test_the_page_about_applications(graphs: dict) -> None:
    page = (DOCS / "apps.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/apps.md", "exec"), {})
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\d+) \| (\d*) ?\|$", page, re.MULTILINE)
    found = {(name, mode): int(n) for name, a, b in rows for mode, n in (("inference", a), ("training", b)) if n}
    assert found == {key: len(graph) for key, graph in graphs.items()}
    assert set(MODELS) <= set(re.findall(r"`([\w+]+)`", page))

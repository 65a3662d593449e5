"""Who runs a model, in operators and FLOPs; what it is predicted to take; what its user should know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from modules import Fn, Recurrent, linear
from places import ROOT
from torch import Tensor, nn

from tilestream.graph.capture import capture
from tilestream.graph.costs import flops
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import rejections
from tilestream.plan.parts import Share
from tilestream.report import excluded, whole
from tilestream.report.explain import Report

H200 = Options(device="h200")
ROWS = 65536


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(dtype).eval()


def rows(n: int, dtype: torch.dtype = torch.bfloat16, features: int = 64) -> Tensor:
    return torch.zeros(1, 1, dtype=dtype).expand(n, features)


MLP_FLOPS = 2 * 64 * 256 * 2


def test_flops_of_products_convolutions_and_attention():
    def forward(m: nn.Module, x: Tensor, image: Tensor) -> object:
        q = x.view(2, 1, -1, 9)
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return m.layers[0](x).relu(), m.layers[1](image), attended

    inputs = [torch.randn(38, 9), torch.randn(2, 3, 8, 8)]
    (graph,) = capture(Fn(forward, linear(9, 13), nn.Conv2d(3, 4, 3)), inputs).graphs
    found = {str(n.target): flops.of_node(n) for n in graph.graph.nodes if n.op == "call_function"}
    assert found["aten.addmm.default"] == 2 * 38 * 9 * 13
    assert found["aten.convolution.default"] == 2 * 2 * 4 * 6 * 6 * 3 * 9
    assert sum(n for op, n in found.items() if "attention" in op) == 2 * 2 * 2 * 19 * 19 * 9
    assert found["aten.relu.default"] == 0


def test_a_region_that_runs_is_dataflow():
    made = analyse(mlp(), (rows(ROWS),), H200)
    assert made.coverage.dataflow == made.coverage.whole == Share(3, MLP_FLOPS * ROWS)
    assert made.regions[0].modules == ("0", "1", "2")
    (region,) = made.regions
    assert region.plan is not None
    assert made.predicted_us == made.candidate_us(region, region.plan.chosen)
    left_us = made.candidate_us(region, region.plan.candidates[-1])
    assert left_us is not None and made.inductor_predicted_us is not None
    assert made.inductor_predicted_us == pytest.approx(left_us), "the region is all of its graph"
    assert left_us > made.predicted_us


def test_a_region_that_inductor_wins_is_inductors():
    made = analyse(nn.Linear(64, 256).bfloat16(), (rows(100),), H200)
    assert made.regions[0].runner == "inductor"
    assert made.coverage.inductor == made.coverage.whole == Share(1, 2 * 100 * 64 * 256)
    assert made.predicted_us == made.inductor_predicted_us
    reference = analyse(nn.Linear(64, 256).bfloat16(), (rows(100),), H200.with_(target="reference"))
    assert reference.regions[0].runner != "inductor"
    assert reference.coverage.dataflow == reference.coverage.whole


def test_eager_is_what_no_graph_holds():
    made = analyse(Recurrent(), (torch.randn(4, 7, 9),), H200)
    assert made.coverage.eager == made.coverage.whole and made.coverage.eager.operators == len(made.eager) > 0
    text = str(Report(made))
    assert "torch.compile captures nothing of this model: all of it runs eagerly" in text
    assert "does not trace nn.RNN, nn.GRU and nn.LSTM" in text and "mkldnn_rnn_layer" in text
    assert whole.ran(made, []) == "no graph: the model ran eagerly"


def test_the_whole_counts_what_lies_outside_of_regions():
    module = Fn(lambda m, x: torch.sort(m.layers[0](x), 0).values, mlp())
    made = analyse(module, (rows(ROWS),), H200)
    alone = analyse(mlp(), (rows(ROWS),), H200)
    assert made.coverage.inductor == Share(1, 0) and alone.predicted_us is not None
    pipeline, sort = made.whole.launches
    assert (pipeline.kind, sort.kind, sort.operators) == ("pipeline", "library", ("aten.sort.default",))
    assert pipeline.predicted_us == pytest.approx(alone.predicted_us)
    assert made.predicted_us == pipeline.predicted_us + sort.predicted_us and sort.predicted_us > 2


def test_regions_of_two_graphs_have_two_names():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x)
        torch._dynamo.graph_break()
        return m.layers[1](h)

    made = analyse(Fn(forward, mlp(), mlp()), (rows(ROWS),), H200)
    assert [r.name for r in made.regions] == ["graph0.region0", "graph1.region0"]
    assert "graph break: Call to `torch._dynamo.graph_break()` at test_analysis.py:" in str(Report(made))


def test_training_says_of_each_graph_what_it_is():
    made = analyse(mlp(), (rows(ROWS),), H200, training=True)
    assert [g.kind for g in made.graphs] == ["forward", "backward"]
    assert made.coverage.whole.flops == ROWS * MLP_FLOPS * 5 // 2  # no gradient of the input
    text = str(Report(made))
    assert "2 graphs (forward, backward), eval mode" in text and "forward graph" in text
    assert {r["name"].split(".")[0] for r in Report(made).json()["regions"]} == {"graph0", "graph1"}


def test_no_rows_have_no_prediction():
    made = analyse(mlp(), (rows(0),), H200)
    assert made.predicted_us is None and made.inductor_predicted_us is None
    assert made.coverage.dataflow.operators == 0
    text = str(Report(made))
    assert "no rows: nothing is launched, and nothing predicted" in text and " us;" not in text


def test_float32_says_what_less_precision_gives_and_what_to_write():
    made = analyse(mlp(torch.float32), (rows(ROWS, torch.float32),), H200)
    tf32, bf16 = made.float32
    for other in (tf32, bf16):
        assert other.coverage is not None and other.coverage.dataflow.operators == 3
    with_tf32 = tf32.predicted_us, tf32.inductor_predicted_us
    wanted = analyse(mlp(), (rows(ROWS),), H200)
    assert (bf16.predicted_us, bf16.inductor_predicted_us) == (wanted.predicted_us, wanted.inductor_predicted_us)
    assert made.predicted_us is not None and with_tf32[0] is not None and with_tf32[0] < made.predicted_us
    without = analyse(mlp(torch.float32), (rows(ROWS, torch.float32),), Options(device="h200", float32_parts=False))
    assert without.predicted_us is not None and all(us is not None and us < without.predicted_us for us in with_tf32)
    text = str(Report(made))
    assert 'tf32: write torch.set_float32_matmul_precision("high")' in text and "model.bfloat16()" in text
    assert torch.get_float32_matmul_precision() == "highest"
    assert not analyse(mlp(), (rows(ROWS),), H200).float32


def test_a_model_that_bf16_breaks_says_so():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("this is for float32 alone")
        return m.layers[0](x)

    module = Fn(forward, mlp(torch.float32))
    _, bf16 = analyse(module, (rows(ROWS, torch.float32),), H200).float32
    assert bf16.coverage is None and "TypeError: this is for float32 alone at test_analysis.py:" in bf16.problem


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(64)])
def test_train_mode_is_told_where_it_matters(layer: nn.Module):
    module = nn.Sequential(mlp(), layer.train()).bfloat16()
    made = analyse(module, (rows(ROWS),), H200)
    assert any(h == f"nn.{type(layer).__name__} in train mode: call model.eval() for inference" for h in made.hints)
    with torch.no_grad():
        assert not analyse(module.eval(), (rows(ROWS),), H200).hints
    assert "train mode" in str(Report(made))


def test_a_call_with_gradients_is_told_not_to_be_inference():
    def told(made: Analysis) -> bool:
        return any(h.startswith("inference graphs, as under torch.no_grad(): called with") for h in made.hints)

    assert told(analyse(mlp(), (rows(ROWS),), H200))
    assert not told(analyse(mlp(), (rows(ROWS),), H200, training=True))
    assert not told(analyse(mlp().requires_grad_(False), (rows(ROWS),), H200))
    with torch.no_grad():
        assert not told(analyse(mlp(), (rows(ROWS),), H200))


def test_the_fast_path_of_an_encoder_is_told():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 2).eval()
    made = analyse(encoder, (torch.randn(4, 50, 64),), H200)
    assert any("set_fastpath_enabled(False)" in hint for hint in made.hints)
    assert made.coverage.whole.flops == 2 * 2 * 200 * (4 * 64 * 64 + 2 * 64 * 128)


def test_exclusions_are_grouped_with_their_modules_and_advice():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x)

    made = analyse(Net().eval(), (torch.randn(2, 3, 16, 16),), H200)
    first, second = excluded.groups(made.exclusions)
    assert (first.title, first.modules) == ("aten.convolution.default x2", ("stem.0", "stem.2"))
    assert first.advice == "nothing: cuDNN runs it" and second.title == "aten.relu.default x2"
    text = str(Report(made))
    assert text.count("a convolution of") == 1 and "stem.0; stem.2" in text


def test_the_same_problem_of_several_candidates_is_told_once():
    made = analyse(mlp(), (rows(ROWS),), H200)
    (region,) = made.regions
    assert region.plan is not None
    bad = [replace(c, rejected="too wide", pipeline=None) for c in region.plan.candidates[:3]]
    assert rejections(bad) == [f"{', '.join(c.name for c in bad)}: too wide"]
    shown = replace(region, plan=replace(region.plan, candidates=(*bad, region.plan.candidates[-1])))
    text = str(Report(replace(made, regions=(shown,))))
    assert text.count("too wide") == 1


def test_a_measurement_of_the_whole_stands_beside_the_prediction():
    made: Analysis = replace(analyse(mlp(), (rows(ROWS),), H200), measured_us=12.5, inductor_measured_us=40.0)
    assert "measured: 12.5 us; all on Inductor: 40.0 us" in str(Report(made))
    assert Report(made).json()["measured_us"] == 12.5


def test_stated_errors_are_those_of_the_published_tables():
    import re

    root = ROOT
    said = re.search(r"\| all of these \| \d+ \| ([\d.]+) % ", (root / "docs" / "truth.md").read_text())
    assert said is not None and abs(float(said[1]) / 100 - whole.SIMULATOR_ERROR) < 0.005

"""Benchmarks of blocks do all but measure without a GPU: predictions, the plot, tiny models, and an end in time."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from places import ROOT

from tilestream.run import timing


@pytest.fixture
def benchmark():
    return importlib.import_module


def test_a_budget_begins_what_ends_in_time(benchmark) -> None:
    now = [0.0]
    budget = benchmark("benchmarks.lib.budget").Budget(100.0, clock=lambda: now[0])
    assert budget.affords("slow", 90.0) and not budget.affords("slow", 110.0)
    with budget.step("slow"):
        now[0] = 40.0
    with pytest.raises(ValueError, match="lost"), budget.step("slow"):
        now[0] = 95.0
        raise ValueError("lost")
    assert budget.left_s == 5.0 and budget.longest_s == {"slow": 55.0}
    assert not budget.affords("slow", 1.0) and budget.affords("fast", 5.0)


def test_gated_blocks_are_predicted_and_plotted(benchmark, tmp_path: Path) -> None:
    gated = benchmark("benchmarks.run.gated_ffn")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["qwen3-0.6b", "--predict", "--rows", "16", "4096", "--out", str(out), "--picture", str(picture)]
    assert gated.main(words) == 0
    few, many = (gated.Predicted(**p) for p in json.loads(out.read_text())["predicted"])
    assert few.gain > 1.3 and many.gain < 0.9, "one kernel pays with few rows, and not with many"
    assert picture.stat().st_size > 10_000


def test_gains_are_over_the_best_other(benchmark) -> None:
    gated = benchmark("benchmarks.run.gated_ffn")
    times = {"eager": 30.0, "max-autotune": 20.0, "shared 8 groups": 12.0, "shared 4 groups": 10.0}
    rows = [gated.Row("S2", 16, arm, 1.0, us, 0.0, True) for arm, us in times.items()]
    assert gated.gains(rows) == {"S2": [(16, 2.0)]}
    assert gated.gains(rows[:2]) == {}


def test_cases_that_would_end_late_are_left_out(
    benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gated, now, done = benchmark("benchmarks.run.gated_ffn"), [0.0], []

    def workload(name: str, w: object, rows: int, wanted: Any, best: object) -> list[object]:
        now[0] += 100.0 if wanted.tuned else 20.0
        done.append((name, rows, wanted.tuned))
        return []

    monkeypatch.setattr(gated, "workload", workload)
    monkeypatch.setattr(gated, "best_splits", lambda *_: [])
    budget = benchmark("benchmarks.lib.budget").Budget
    assert list(gated.measured(["S2"], [128, 1, 512, 16], 1, [128, 1], budget(160.0, clock=lambda: now[0]))) == 4 * [[]]
    assert done == [("S2", 128, True), ("S2", 1, False), ("S2", 512, False), ("S2", 16, False)]
    assert list(gated.measured(["S2"], [128], 1, [128], budget(10.0, clock=lambda: 0.0))) == []
    assert "S2, 128 rows: left out" in capsys.readouterr().out


def run(decoders: ModuleType, out: Path, *words: str, arms: tuple[str, ...] = ("eager", "tilestream")) -> list[dict]:
    size = ["--cpu", "--layers", "1", "--calls", "1", "--out", str(out)]
    assert decoders.main([*words, *size, "--arms", *arms]) == 0
    return json.loads(out.read_text())["rows"]


def test_a_block_of_one_row_goes_through_every_step(benchmark, fresh: None, tmp_path: Path) -> None:
    decoders, out = benchmark("benchmarks.run.decoders"), tmp_path / "out.json"
    out.write_text(json.dumps({"rows": [{"case": "gpt2", "rows": n, "arm": "eager"} for n in (1, 16)]}))
    rows = run(decoders, out, "blocks", "--rows", "1", "--only", "gpt2")
    assert [(r["case"], r["rows"], r["arm"]) for r in rows] == [
        ("gpt2", 16, "eager"), ("gpt2", 1, "eager"), ("gpt2", 1, "tilestream"),
    ]  # fmt: skip
    eager, ours = rows[1:]
    assert ours["error"] < 2 * eager["error"] and "shared" in str(ours["detail"])  # pyright: ignore


def test_resnet_goes_through_every_step(benchmark, fresh: None, tmp_path: Path) -> None:
    decoders, out = benchmark("benchmarks.run.decoders"), tmp_path / "out.json"
    rows = run(decoders, out, "models", "--batch", "1", "32", "--only", "resnet-50", arms=("eager",))
    assert [(r["rows"], r["arm"]) for r in rows] == [(1, "eager"), (32, "eager")]


def test_arms_that_were_not_timed_again_are_kept_and_said_to_be_of_another_run(benchmark) -> None:
    decoders = benchmark("benchmarks.run.decoders")
    old = [
        {"case": "gpt2", "rows": n, "arm": arm, "detail": "2 blocks; "} for n in (1, 16) for arm in ("eager", "tuned")
    ]
    made = decoders.Row("gpt2", 1, "eager", 2.0, 0.0, 0.0, "new")
    for _ in range(2):  # said once
        old = decoders.merged(old, [made])
    assert sorted((r["rows"], r["arm"], r["detail"]) for r in old) == [
        (1, "eager", "new"), (1, "tuned", "another run; 2 blocks; "),
        (16, "eager", "2 blocks; "), (16, "tuned", "2 blocks; "),
    ]  # fmt: skip


def test_arms_that_would_end_late_are_left_out(
    benchmark, fresh: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoders, out = benchmark("benchmarks.run.decoders"), tmp_path / "out.json"
    rows = run(decoders, out, "blocks", "--rows", "1", "--only", "gpt2", "--seconds", "12")
    assert [r["arm"] for r in rows] == ["eager"]
    assert "tilestream left out" in capsys.readouterr().out
    assert run(decoders, tmp_path / "none.json", "blocks", "--rows", "1", "--seconds", "5") == []


def test_resnet_50_is_resnet_50(benchmark) -> None:
    import torch

    with torch.device("meta"):
        made = benchmark("benchmarks.lib.block_models").ResNet()
    assert sum(p.numel() for p in made.parameters()) == 25_557_032


def test_the_page_of_blocks_shows_the_result(benchmark) -> None:
    shares = benchmark("benchmarks.tables.shares")
    made = shares.tables(shares.read(shares.RESULT.read_text(encoding="utf-8")))
    text = shares.PAGE.read_text(encoding="utf-8")
    assert shares.filled(text, made) == text, "run python -m benchmarks.tables.shares --tables"


def test_parts_of_models_by_their_modules(benchmark) -> None:
    shares = benchmark("benchmarks.tables.shares")
    paths = {
        "model.layers.0.self_attn.q_proj": "q, k, v",
        "transformer.h.0.attn.c_attn": "q, k, v",
        "transformer.h.0.attn.c_proj": "output projection",
        "transformer.h.0.mlp.c_proj": "FFN",
        "encoder.layer.0.attention.output.dense": "output projection",
        "encoder.layer.0.output.dense": "FFN",
        "blocks.0.mlp_tokens.fc1": "token mixing",
        "blocks.0.mlp_channels.fc1": "FFN",
        "layer1.0.conv2": "convolutions",
        "model.lm_head": "head",
    }
    assert {path: shares.part_of(path) for path in paths} == paths
    inside = ["layers.0.attention", "h.0.attn", "encoder.layer.1.attention.self", *paths]
    assert [p for p in inside if shares.ATTENTION.search(p)] == inside[:3]


def test_a_layer_counts_as_often_as_the_model_has_it(benchmark) -> None:
    """A block of ours under a name that layers have, and a head: 3 layers of one captured."""
    import torch
    from torch import nn

    shares = benchmark("benchmarks.tables.shares")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(48, 520), nn.ReLU(), nn.Linear(520, 48))])
            self.lm_head = nn.Linear(48, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.layers[0](x))

    def make(layers: int, tiny: bool) -> nn.Module:
        return Model()

    class Given(shares.RealModel):
        def inputs(self, case: object, tiny: bool = False, device: str = "meta") -> tuple[torch.Tensor, ...]:
            return (torch.randn(16, 48, device=device, dtype=torch.bfloat16),)

    torch.compiler.reset()
    row = shares.measured(Given("one", 3, make, ()), shares.Case(16))
    assert row.layers.keys() == {"FFN"} and row.outside.keys() == {"head"} and row.attention == 0
    assert row.layers["FFN"].flops == row.layers["FFN"].regions == 3 * 2 * 16 * 2 * 48 * 520
    assert row.outside["head"].flops == row.outside["head"].regions == 2 * 16 * 48 * 1000
    assert row.outside["head"].runs == 0
    assert list(row.outside["head"].reasons.values()) == [row.outside["head"].flops]


def test_a_whole_decoder_has_embedding_and_head(benchmark, fresh: None, tmp_path: Path) -> None:
    decoders, out = benchmark("benchmarks.run.decoders"), tmp_path / "out.json"
    words = ["models", "--batch", "1", "--only", "qwen3-0.6b", "--layers", "0", "--cpu", "--arms", "eager"]
    assert decoders.main([*words, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["case"] == "decode qwen3-0.6b, whole" and row["detail"] == "all layers; "


def test_kernels_of_a_graph_are_in_order_with_what_passes_between(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    times = benchmark("benchmarks.lib.kernel_times")

    def event(name: str, start: float, end: float, where: str = "CUDA") -> SimpleNamespace:
        span, place = SimpleNamespace(start=start, end=end), SimpleNamespace(name=where)
        return SimpleNamespace(name=name, time_range=span, device_type=place, is_user_annotation=False)

    events = [event("b", 14.0, 20.0), event("a", 10.0, 13.0), event("c", 18.0, 19.0), event("host", 0.0, 1.0, "CPU")]
    recorded = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(times, "profile", lambda **_: recorded)
    monkeypatch.setattr(times, "warm_up", lambda _: None)
    found = times.kernels_of(SimpleNamespace(graph=SimpleNamespace(replay=lambda: None)))
    assert [(k.name, k.us, k.gap_us) for k in found] == [("a", 3.0, 0.0), ("b", 6.0, 1.0), ("c", 1.0, -2.0)]


def test_cases_side_by_side_have_a_process_each_and_slow_arms_another(
    benchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apart, script = benchmark("benchmarks.run.side_by_side"), tmp_path / "case.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import json, pathlib\nfrom benchmarks.run import side_by_side\n"
        "given = lambda name: sys.argv[sys.argv.index(name) + 1]\n"
        "elsewhere = side_by_side.Elsewhere(pathlib.Path(given('--elsewhere')))\n"
        "if '--compile-only' in sys.argv:\n"
        "    elsewhere.say('max-autotune', 12.5)\n"
        "else:\n"
        "    row = {'case': given('--only'), 'first': elsewhere.wait('max-autotune', lambda: 20.0)}\n"
        "    pathlib.Path(given('--out')).write_text(json.dumps({'rows': [row]}))\n"
    )
    monkeypatch.setattr(apart, "COMMAND", [sys.executable, str(script)])
    found = list(apart.run(apart.cases(["a:1", "b:32"]), ["eager", "max-autotune"], 60.0, ["--layers", "2"]))
    assert found == [[{"case": "a", "first": 12.5}], [{"case": "b", "first": 12.5}]]
    assert apart.Elsewhere(tmp_path).wait("max-autotune", lambda: 0.0) is None, "it comes too late"


def test_one_process_at_a_time_has_the_gpu(benchmark, tmp_path: Path) -> None:
    import fcntl

    turns = benchmark("benchmarks.lib.turns").Turns(tmp_path)
    with (tmp_path / "timing").open("w") as other:
        with turns.turn(), turns.turn():  # a turn inside one is the same
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_clocks_are_up_behind_another_turn_alone(benchmark, tmp_path: Path) -> None:
    turns, timed = benchmark("benchmarks.lib.turns").Turns(tmp_path), timing._timed_until_s
    with turns.turn():
        assert timed == [-math.inf], "nobody had the GPU before"
    with turns.turn():
        assert timed[0] > 0

"""torch.compile end to end with ``target="reference"``, on the CPU, against eager."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from modules import ALL, Fn, linear
from on_reference import REFERENCE, check, compiled
from torch import Tensor, nn

from tilestream.announce import STRICT
from tilestream.errors import PlanError, TilestreamError
from tilestream.plan import planner
from tilestream.plan.candidates import Candidate
from tilestream.run import executable as execution
from tilestream.run import oracle, prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("name", ["gelu", "alpha", "reductions", "gated_wide", "several_outputs", "heads", "select"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.every(3)
def test_modules(name: str, dtype: torch.dtype):
    module, shapes = ALL[name]
    check(module.to(dtype), *(torch.randn(s).to(dtype) for s in shapes))
    assert prepare.analyses()[0].plan is not None


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["bulk", "vertical", "spatial"])
def test_strategies_mean_the_same(strategy: str):
    module = nn.Sequential(linear(9, 33), nn.ReLU(), linear(33, 65), nn.LayerNorm(65), linear(65, 3)).bfloat16()
    check(module, torch.randn(201, 9).bfloat16(), strategy=strategy)
    (analysis,) = prepare.analyses()
    assert analysis.plan and analysis.plan.chosen.strategy == strategy


@pytest.mark.parametrize("shape", [(9,), (1, 9), (64, 9), (65, 9), (2, 3, 9), (2, 1, 3, 9)])
def test_leading_dimensions(shape: tuple[int, ...]):
    check(Fn(lambda m, x: m.layers[0](x).relu() + 1, linear(9, 13)).bfloat16(), torch.randn(shape).bfloat16())


def test_a_new_row_count_builds_nothing():
    module = Fn(lambda m, x: m.layers[0](x).softmax(-1), linear(9, 13)).bfloat16()
    fast = compiled(module)
    for rows in (37, 64, 1, 130, 5, 0):
        check(module, torch.randn(rows, 9).bfloat16(), fast=fast)
    assert len(execution._executables) == 1


def test_a_much_larger_batch_is_planned_anew():
    module = Fn(lambda m, x: m.layers[0](x).softmax(-1), linear(9, 13)).bfloat16()
    fast = compiled(module)
    with torch.no_grad():
        for rows in (64, 65 * prepare.GROWTH):
            fast(torch.randn(rows, 9).bfloat16())
    assert [a.plan.rows for a in prepare.analyses() if a.plan] == [64, 65 * prepare.GROWTH]


def test_no_rows(caplog: pytest.LogCaptureFixture):
    module = Fn(lambda m, x: (m.layers[0](x), m.layers[0](x).mean(-1)), linear(9, 13)).bfloat16()
    with torch.no_grad():
        whole, mean = compiled(module)(torch.randn(3, 0, 9).bfloat16())
    assert whole.shape == (3, 0, 13) and mean.shape == (3, 0)
    assert "as fast there" not in caplog.text  # nothing was compared


def test_views_around_a_region_keep_eagers_strides():
    module = Fn(lambda m, x: m.layers[0](x.transpose(0, 1)).transpose(0, 1), linear(9, 13)).bfloat16()
    check(module, torch.randn(4, 5, 9).bfloat16())


def test_non_contiguous_and_overlapping_inputs():
    module = Fn(lambda m, x, y: m.layers[0](x) * y, linear(9, 13)).bfloat16()
    x = torch.randn(37, 18).bfloat16()[:, ::2]
    check(module, x, torch.randn(1, 13).bfloat16().expand(37, 13))


def test_the_weight_may_change():
    module = linear(9, 13).bfloat16()
    fast, x = compiled(module), torch.randn(37, 9).bfloat16()
    check(module, x, fast=fast)
    with torch.no_grad():
        module.weight.mul_(-2)
    check(module, x, fast=fast)


def test_outputs_that_alias_inputs():
    module = Fn(lambda m, x: (x, x.view(9, 37), m.layers[0](x)), linear(9, 13)).bfloat16()
    x = torch.randn(37, 9).bfloat16()
    with torch.no_grad():
        same, view, _ = compiled(module)(x)
    assert same is x and view.data_ptr() == x.data_ptr()


def test_inputs_may_be_mutated():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x)
        x.add_(1)
        return h + m.layers[0](x)

    module = Fn(forward, linear(9, 9)).bfloat16()
    x = torch.randn(37, 9).bfloat16()
    mine, plain = x.clone(), x.clone()
    with torch.no_grad():
        got, want = compiled(module)(mine), module(plain)
    assert torch.equal(mine, plain)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_propagate_as_in_eager(special: float):
    module = Fn(lambda m, x: m.layers[0](x).relu(), linear(9, 13)).bfloat16()
    x = torch.randn(37, 9).bfloat16()
    x[3, 4] = special
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x), equal_nan=True, rtol=0.05, atol=0.05)


def test_what_is_not_taken_runs_and_is_said_once(caplog: pytest.LogCaptureFixture):
    module = Fn(lambda m, x: m.layers[0](x).cumsum(-1).relu(), linear(9, 13)).bfloat16()
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(module, torch.randn(37, 9).bfloat16())
        torch._dynamo.reset()
        check(module, torch.randn(37, 9).bfloat16())
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("tilestream")]
    assert len(lines) == 1
    said = r"2 of 3 operators go to Inductor, with \d+% of the predicted time\. Most of it, \d+%: aten\.cumsum\.default"
    assert re.search(rf"{said}.* \(test_backend\.py:\d+ in ", lines[0]), lines


def test_the_operators_that_take_most_of_the_time_are_named(caplog: pytest.LogCaptureFixture):
    """Not the first one that stays out, a scan of 8 rows, but the two sorts of all of them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.layers[0](x[:8].cumsum(0)).relu()
        return m.layers[1](x).relu().sort(0).values.sort(0).values + h[0]

    module = Fn(forward, linear(64, 64), linear(64, 64)).bfloat16()
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(module, torch.randn(3000, 64).bfloat16())
    (line,) = [r.getMessage() for r in caplog.records if "operators go to Inductor" in r.getMessage()]
    assert re.search(r"Most of it, \d+%: (2 )?aten\.sort\.default.* \(test_backend\.py:", line), line


def test_sizes_that_are_not_known_at_all():
    module = Fn(lambda m, x: m.layers[0](x.flatten(0, 1)).unflatten(0, x.shape[:2]), linear(9, 13)).bfloat16()
    x = torch.randn(3, 7, 9).bfloat16()
    torch._dynamo.decorators.mark_unbacked(x, 0)
    check(module, x)
    assert len(prepare.analyses()) == 1


def test_inference_mode_and_static_shapes():
    module = linear(9, 13).bfloat16()
    fast = torch.compile(module, backend=tilestream, options=REFERENCE, dynamic=False, fullgraph=True)
    for rows in (37, 40):
        x = torch.randn(rows, 9).bfloat16()
        with torch.inference_mode():
            torch.testing.assert_close(fast(x), module(x), rtol=0.05, atol=0.05)


def test_constants_beside_inductor():
    module = Fn(lambda m, x: (m.layers[0](x) + torch.tensor(0.5)).cumsum(-1) * torch.arange(13.0), linear(9, 13))
    check(module.bfloat16(), torch.randn(37, 9).bfloat16())


def test_a_region_without_a_legal_pipeline_goes_to_inductor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any) -> Any:
        raise PlanError("nothing fits", "use a larger device")

    monkeypatch.setattr(planner, "proposals", refuse)
    module = nn.Sequential(linear(9, 13), nn.ReLU()).bfloat16()
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(module, torch.randn(37, 9).bfloat16())
    assert any("goes to Inductor: nothing fits" in r.getMessage() for r in caplog.records)
    assert "as fast there" not in caplog.text
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="nothing fits"):
        compiled(module, fallback=False)(torch.randn(37, 9).bfloat16())


def test_a_plan_that_prefers_inductor_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    asked = planner.question
    monkeypatch.setattr(planner, "proposals", lambda *_: (Candidate("fallback", None, 2.0),))
    monkeypatch.setattr(planner, "question", lambda *given: replace(asked(*given), forced=False))  # as of a GPU
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(nn.Sequential(linear(9, 13), nn.ReLU()).bfloat16(), torch.randn(37, 9).bfloat16())
    assert any("1 of 1 regions go to Inductor, which is as fast" in r.getMessage() for r in caplog.records)


def test_a_model_without_a_region_runs():
    check(Fn(lambda m, x: (x.cumsum(0) * 2,)), torch.randn(37, 9).bfloat16())


def gradients(function: Any, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    module.zero_grad()
    function(*inputs).square().mean().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_training_has_regions_forward_and_backward():
    module = nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 17), nn.ReLU(), linear(17, 5)).bfloat16()
    x = torch.randn(137, 9).bfloat16()
    got, eager = gradients(compiled(module), module, x), gradients(module, module, x)
    exact = gradients(module.double(), module, x.double())
    error, own, good = oracle.judge(got, eager, exact)
    assert good, f"error {error:.2e}, eager's {own:.2e}"
    assert len(got) == 6
    (forward, *backward) = prepare.analyses()
    assert len(forward.operators) == 5 and sum("threshold_backward" in str(a.operators) for a in backward) == 1


def test_auto_on_the_cpu_goes_to_inductor(caplog: pytest.LogCaptureFixture):
    module, x = linear(9, 13), torch.randn(37, 9)
    with caplog.at_level(logging.WARNING, "tilestream"), torch.no_grad():
        got = torch.compile(module, backend=tilestream)(x)
        torch.testing.assert_close(got, module(x))
    assert any("everything goes to Inductor" in r.getMessage() and "CPU" in r.getMessage() for r in caplog.records)


def test_without_inductor_the_rest_runs_eagerly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    monkeypatch.delenv(STRICT)
    module = Fn(lambda m, x: m.layers[0](x).cumsum(-1), linear(9, 13)).bfloat16()
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(module, torch.randn(37, 9).bfloat16())
    assert any("runs eagerly (RuntimeError: no C++ compiler)" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"target": "cuda"}, "DeviceError", "tensors are on the CPU"),
        ({"target": "cuda", "strategi": "bulk"}, "OptionError", "did you mean 'strategy'"),
        ({"target": "auto", "fallback": False}, "DeviceError", "use target='reference'"),
        ({"target": "reference", "device": "h3000"}, "DeviceError", "unknown device"),
    ],
)
def test_errors_keep_their_type_and_remedy(options: dict[str, Any], error: str, says: str):
    with torch.no_grad(), pytest.raises(Exception) as caught:
        torch.compile(linear(9, 13), backend=tilestream, options=options)(torch.randn(37, 9))
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, TilestreamError) and type(inner).__name__ == error
    assert says in str(inner)


def test_fallback_off_names_the_operator():
    module = Fn(lambda m, x: m.layers[0](x).cumsum(-1), linear(9, 13)).bfloat16()
    with torch.no_grad(), pytest.raises(Exception, match="aten.cumsum.default at test_backend.py"):
        compiled(module, fallback=False)(torch.randn(37, 9).bfloat16())


def test_autocast_streams():
    module = nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 5))
    x = torch.randn(37, 9)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(module)(x), module(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert [op.kind for op in prepare.analyses()[0].program.stages[0].ops].count("linear") == 2


@pytest.mark.skipif(
    not importlib.metadata.entry_points(group="torch_dynamo_backends", name="tilestream"),
    reason="tilestream is not installed, only on the path",
)
def test_the_entry_point_needs_no_import():
    assert "tilestream" in torch._dynamo.list_backends()

"""The kernel of a decode step on the host, where a lane is a fiber and CTAs run at once, and compiled."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_steps import FORMS, made_up, on_host

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRace, HostRun, Mutation
from tilestream.errors import CompileError, InputError, QueueTimeout, TilestreamError
from tilestream.kernels.step.form import GPT2, QWEN3, Form
from tilestream.kernels.step.kernel import NAME, StepKernel
from tilestream.kernels.step.shape import Shape

gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SMALL = Shape(2, 64, 96, 4, 2, 64, 160, 44, warps=2)
CASES = {
    "two shares of the cache": (SMALL, 150),
    "norms of heads, three queries a head of keys": (Shape(2, 96, 64, 3, 1, 128, 9, 24, form=QWEN3, warps=2), 3),
    "no mask": (replace(SMALL, masked=False, positions=40), 17),
    "rows of two pieces": (Shape(1, 544, 576, 2, 2, 64, 8, 16, warps=2), 0),
    "2 sequences": (replace(SMALL, batch=2, warps=4), 150),
    "7 sequences": (replace(SMALL, batch=7, positions=24), 11),
    "8 sequences, no mask": (replace(SMALL, batch=8, positions=24, masked=False, warps=4), 11),
    "16 sequences": (replace(SMALL, batch=16, positions=40), 39),
    "32 sequences, rows of two pieces": (Shape(1, 544, 96, 4, 2, 64, 40, 17, warps=4, batch=32, form=QWEN3), 36),
    "GPT-2": (Shape(2, 128, 96, 2, 2, 64, 24, 21, warps=4, form=GPT2), 7),
    "GPT-2, 3 sequences, rows of two pieces": (Shape(1, 544, 96, 2, 2, 64, 300, 9, warps=2, batch=3, form=GPT2), 290),
}
for name, form in FORMS.items():
    CASES[name] = (replace(SMALL, form=form, positions=40, batch=2, vocabulary=43), 19)
CASES["Phi-4's"] = (Shape(2, 96, 64, 3, 1, 128, 9, 24, warps=2, form=FORMS["Phi-4's"]), 3)
CASES["a wide head's"] = (Shape(2, 96, 64, 3, 1, 128, 9, 24, warps=2, form=FORMS["a wide head's"]), 3)


@gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(8)
def test_values(name: str) -> None:
    shape, place = CASES[name]
    given = made_up(shape, place)
    exact, plain, got = given.to(torch.float64), given.to(torch.float32), given
    (logits,) = on_host(got, StepKernel(shape), 3)
    want = exact.run()
    assert torch.isfinite(logits).all()
    error = ((logits.double() - want).norm() / want.norm()).item()
    assert error < 6e-3, error
    plain.run()
    assert all(int(n) == place + 1 for n in got.lengths)
    for mine, theirs in zip(got.caches, plain.caches, strict=True):
        assert torch.equal(mine[:, :, place + 1 :], theirs[:, :, place + 1 :].to(mine.dtype))
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)


@gxx
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.every(2)
def test_delays_and_other_orders_change_no_bit_and_lengths_are_counted(seed: int) -> None:
    shape, place = replace(CASES["no mask"][0], batch=2), 17
    first, second = made_up(shape, place), made_up(shape, place)
    kernel = StepKernel(shape)
    plain = on_host(first, kernel, 3, steps=3)
    delayed = on_host(second, replace(kernel, delays=True), 4, HostRun(seed=seed), steps=3)
    for a, b in zip([*plain, *first.caches], [*delayed, *second.caches], strict=True):
        assert torch.equal(a, b)
    assert {int(n) for n in (*first.lengths, *second.lengths)} == {place + 3}
    assert not torch.equal(plain[0], plain[1])


@gxx
def test_stamps_are_in_order() -> None:
    shape, place = CASES["no mask"]
    stamps: list[torch.Tensor] = []
    on_host(made_up(shape, place), StepKernel(shape, stamps=True), 4, stamps=stamps)
    (noted,) = stamps
    assert noted.shape == (4, shape.layers + 1, 6, 3)
    for cta in noted:
        there = cta.reshape(-1, 3)[cta.reshape(-1, 3)[:, 2] > 0]
        assert len(there) >= 3 * shape.layers + 1  # of products alone: some have no head to attend to
        assert (there[:, 0] <= there[:, 2]).all() and (there[1:, 0] >= there[:-1, 2]).all()
    assert (noted[:, -1, :-1] == 0).all() and (noted[:, -1, -1, 2] > 0).all()


@gxx
def test_lanes_do_not_race() -> None:
    shape, place = CASES["two shares of the cache"]
    (logits,) = on_host(made_up(shape, place), StepKernel(shape), 3, HostRun(sanitize=True))
    assert torch.isfinite(logits).all()


@gxx
def test_a_race_between_ctas_is_seen() -> None:
    shape, place = CASES["no mask"]
    plain = Mutation("step.cuh", "lanes::post(length, lanes::peek(length) + 1);", "++*length;")
    with pytest.raises(HostRace, match="step.cuh"):
        on_host(made_up(shape, place), StepKernel(shape), 3, HostRun(sanitize=True, mutations=(plain,)))


@gxx
def test_a_slot_that_is_freed_without_a_fence_is_seen() -> None:
    """An arrival does not wait for loads in front of it: the next copy may come before them."""
    shape, place = CASES["no mask"]
    given = made_up(replace(shape, layers=4), place)
    bare = Mutation("step_rows.cuh", "    lanes::fence_copies();\n", "")
    with pytest.raises(TilestreamError, match="no fence is between them"):
        on_host(given, StepKernel(replace(shape, layers=4)), 3, HostRun(mutations=(bare,)))


@gxx
def test_a_wait_that_expires_says_who_waited_for_what() -> None:
    shape, place = CASES["no mask"]
    lost = Mutation("step.cuh", "MIDDLE, WIDTH, at, v, tag);", "MIDDLE, WIDTH, at, v, at.row == 10 ? 0 : tag);")
    with pytest.raises(QueueTimeout, match="waited for word 3 that gate and up of layer 0 reads"):
        on_host(made_up(shape, place), StepKernel(shape, timeout_ns=1_000_000), 4, HostRun(mutations=(lost,)))


@gxx
def test_a_position_behind_the_cache() -> None:
    shape, _ = CASES["no mask"]
    given = made_up(shape, shape.positions)
    with pytest.raises(InputError, match="position 40 of a cache of 40"):
        on_host(given, StepKernel(shape, timeout_ns=1_000_000), 4)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"batch": 33}, "33 sequences"),
        ({"form": Form(rotary=0.125)}, "a rotary embedding of 8 features"),
        ({"form": Form(turned=True)}, "otherwise than GPT-2's"),
        ({"form": Form(gate_up="parts", biased=("gate",))}, "in one weight, with biases"),
        ({"form": Form(no_rope=(3, 64)), "layers": 65}, "a layer behind the first 64 without"),
    ],
)
def test_what_no_kernel_is_for(given: dict[str, Any], why: str) -> None:
    assert why in replace(SMALL, **given).refusal


def test_a_forms_text() -> None:
    for form in (*FORMS.values(), GPT2, QWEN3, Form()):
        assert Form.of(form.text) == form
    for text in ("{", '{"norm": "batch"}', '{"window": 1}', "[]"):
        with pytest.raises(InputError, match="is no form of a decoder"):
            Form.of(text)


MODELS = {
    "SmolLM-135M": Shape(30, 576, 1536, 9, 3, 64, 512, 49152),
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 512, 151936, form=QWEN3),
    "Llama-3.2-1B": Shape(16, 2048, 8192, 32, 8, 64, 512, 128256),
    "GPT-2": Shape(12, 768, 3072, 12, 12, 64, 512, 50257, form=GPT2),
}


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_compiles(name: str, batch: int) -> None:
    kernel = StepKernel(replace(MODELS[name], batch=batch))
    assert not kernel.shape.refusal
    assert kernel.shape.slots >= 4
    try:
        report = compile_text(kernel.text, NAME, kernel.shape.shared_bytes)
    except CompileError as missing:
        pytest.skip(missing.cause)
    assert report.registers <= 168 and report.spills <= (0 if batch == 1 else 2500)

"""A decode step as one kernel on a GPU: values, bits, delays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_steps import FORMS, NUMBERS, Step, made_up

from tilestream.graph.decode import STEP
from tilestream.kernels.step.form import GPT2, QWEN3
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape
from tilestream.run.record_step import record_step

pytestmark = pytest.mark.gpu

SHAPES = {
    "SmolLM's, 4 layers": (Shape(4, 576, 1536, 9, 3, 64, 512, 1000), 400),
    "Qwen3's, 2 layers": (Shape(2, 1024, 3072, 16, 8, 128, 512, 1000, form=QWEN3), 511),
    "Llama's, 2 layers": (Shape(2, 2048, 8192, 32, 8, 64, 512, 1000), 0),
    "small, no mask": (Shape(3, 64, 96, 4, 2, 64, 40, 27, masked=False), 17),
    "GPT-2's, 4 layers": (Shape(4, 768, 3072, 12, 12, 64, 512, 1001, form=GPT2), 400),
    "SmolLM's, 16 sequences": (Shape(4, 576, 1536, 9, 3, 64, 512, 1000, batch=16), 400),
    "Qwen3's, 7 sequences": (Shape(2, 1024, 3072, 16, 8, 128, 512, 1000, form=QWEN3, batch=7), 300),
    "Qwen3's, 32 sequences": (Shape(2, 1024, 3072, 16, 8, 128, 512, 1000, form=QWEN3, batch=32), 511),
    "GPT-2's, 8 sequences": (Shape(2, 768, 3072, 12, 12, 64, 512, 1001, form=GPT2, batch=8), 400),
    "Qwen2.5's, 2 layers": (Shape(2, 896, 4864, 14, 2, 64, 512, 1000, form=FORMS["Qwen2's"]), 400),
    "Pythia's, 4 layers": (Shape(4, 768, 3072, 12, 12, 64, 512, 1000, form=FORMS["Pythia's"]), 400),
    "Pythia's, 16 sequences": (Shape(4, 768, 3072, 12, 12, 64, 512, 1000, form=FORMS["Pythia's"], batch=16), 400),
    "Phi's, 3 sequences": (Shape(2, 2048, 8192, 32, 32, 64, 512, 1001, form=FORMS["Phi's"], batch=3), 300),
    "Phi-4's, 2 layers": (Shape(2, 3072, 8192, 24, 8, 128, 512, 1000, form=FORMS["Phi-4's"]), 511),
    "StableLM's, 2 layers": (Shape(2, 2048, 5632, 32, 32, 64, 512, 1000, form=FORMS["StableLM's"]), 100),
    "Gemma's, 2 layers": (Shape(2, 2048, 16384, 8, 1, 256, 512, 1000, form=FORMS["Gemma's"]), 100),
    "Arcee's, 8 sequences": (Shape(2, 2560, 18432, 20, 4, 128, 512, 1000, form=FORMS["Arcee's"], batch=8), 100),
    "StarCoder2's, 2 layers": (Shape(2, 3072, 12288, 24, 4, 128, 512, 1000, form=FORMS["StarCoder2's"]), 100),
    "wide, 2 sequences": (Shape(1, 4096, 4096, 32, 8, 128, 512, 1000, batch=2), 500),
}


def run(given: Step) -> torch.Tensor:
    return STEP(*given.operands, True, *NUMBERS)


@pytest.mark.parametrize("name", SHAPES)
def test_values(name: str) -> None:
    shape, place = SHAPES[name]
    given = made_up(shape, place, device="cuda")
    exact, again = given.to(torch.float64), given.to(torch.bfloat16)
    got, same, want = run(given), run(again), exact.run()
    assert torch.equal(got, same)
    assert ((got.double() - want).norm() / want.norm()).item() < 6e-3
    assert {int(n) for n in given.lengths} == {place + 1}


@pytest.mark.parametrize("name", ["wide, 2 sequences", "Qwen3's, 32 sequences", "SmolLM's, 4 layers"])
def test_a_hundred_steps_give_the_same_bits(name: str) -> None:
    """Where rows are wide the ring goes round fastest: a slot that is freed too early shows here."""
    from tilestream.cuda.step import loaded

    shape, place = SHAPES[name]
    tensors = made_up(shape, place, device="cuda").tensors
    kernel = loaded(StepKernel(shape), 0)
    want = kernel(*tensors, (0, *NUMBERS))
    for _ in range(100):
        assert torch.equal(kernel(*tensors, (0, *NUMBERS)), want)


def test_stamps() -> None:
    from tilestream.cuda.step import loaded

    shape, place = SHAPES["SmolLM's, 4 layers"]
    kernel = loaded(StepKernel(shape, stamps=True), 0)
    kernel(*made_up(shape, place, device="cuda").tensors, (0, *NUMBERS))
    noted = kernel.stamps[kernel.stamps[..., 2] > 0]
    assert len(noted) > 3 * shape.layers * 72 and (noted[:, 0] <= noted[:, 2]).all()


DELAYED = ("SmolLM's, 4 layers", "Qwen3's, 32 sequences", "GPT-2's, 8 sequences", "Pythia's, 16 sequences")


@pytest.mark.parametrize("name", DELAYED)
def test_steps_with_delays_in_a_graph(name: str) -> None:
    from tilestream.cuda.step import loaded

    shape, place = SHAPES[name]
    tensors = made_up(shape, place, device="cuda").tensors
    want = loaded(StepKernel(shape), 0)(*tensors, (0, *NUMBERS))
    delayed = loaded(StepKernel(replace(shape), delays=True), 0)
    delayed(*tensors, (0, *NUMBERS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = delayed(*tensors, (0, *NUMBERS))
    for _ in range(300):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_a_recording() -> None:
    """Every stage of every layer is stamped, by CTAs that end after they begin."""
    shape = Shape(4, 576, 1536, 9, 3, 64, 512, 1000)
    found = record_step(shape)
    slices = list(found.slices())
    assert {(s.layer, s.stage) for s in slices} >= {(n, "gate and up") for n in range(4)} | {(4, "head")}
    assert all(s.begin_us <= s.values_us <= s.end_us for s in slices)
    assert 0 < found.time_us < found.stamped_us * 1.05
    assert max(s.end_us for s in slices) < 2 * found.stamped_us

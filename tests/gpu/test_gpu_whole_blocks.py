"""Whole blocks of real models on the GPU: GPT-2's weights copied once, batches of one weight, Hugging Face's layers."""

from __future__ import annotations

import importlib

import pytest
import torch
from real_blocks import Gpt2Block, Mixing

from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu


def errors(got: torch.Tensor, near: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    return float((got.double() - want).norm()), float((near.double() - want).norm())


@pytest.mark.parametrize("constant", [False, True])
def test_gpt2s_block_follows_its_weights(fresh: None, constant: bool) -> None:
    """Forced, with weights that lie [in, out]: copied at every call, or once and after changes that torch counts."""
    torch.manual_seed(0)
    module = Gpt2Block(768, 3072).cuda().bfloat16().eval()
    x = torch.randn(1, 16, 768, device="cuda", dtype=torch.bfloat16)
    options = {"strategy": "shared", "constant_weights": constant, "effort": "model"}
    compiled = torch.compile(module, backend=tilestream, options=options)
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x)
            assert torch.equal(got, compiled(x.clone()))
            own, eager = errors(got, module(x), module.double()(x.double()))
            module.bfloat16()
            assert own <= 2 * eager
            module.up.weight.mul_(0.5)
    assert prepare.analyses()[-1].plan.chosen.strategy == "shared"  # pyright: ignore[reportOptionalMemberAccess]


def test_a_captured_graph_reads_the_copies(fresh: None) -> None:
    torch.manual_seed(0)
    module = Gpt2Block(768, 3072).cuda().bfloat16().eval()
    x = torch.randn(1, 16, 768, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(
        module, backend=tilestream, options={"strategy": "shared", "constant_weights": True, "effort": "model"}
    )
    with torch.no_grad():
        want = compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = compiled(x)
        for _ in range(3):
            got.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(got, want)


def test_token_mixing_streams(fresh: None) -> None:
    torch.manual_seed(0)
    module = Mixing(196, 384, 768).cuda().bfloat16().eval()
    x = torch.randn(32, 196, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream, options={"strategy": "vertical"})(x)
        own, eager = errors(got, module(x), module.double()(x.double()))
    assert own <= 2 * eager


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "gpt2", "bert-base", "vit-base", "mixer-b16"])
def test_a_layer_at_its_real_width(fresh: None, name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    models = importlib.import_module("benchmarks.lib.real_models")
    torch.manual_seed(0)
    model = models.MODELS[name]
    module = models.module(model, 1, device="cuda")
    (x,) = model.inputs(model.cases[0], device="cuda")
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream)(x)
        near = module(x)
        want = module.double()(x.double() if x.is_floating_point() else x)
    own, eager = errors(got, near, want)
    assert own <= 2 * eager

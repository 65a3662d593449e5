"""Models of Hugging Face and timm: values at tiny widths, and shares of FLOPs in regions at real ones."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'tilestream[models]')")
pytest.importorskip("timm", reason="timm is not installed (pip install 'tilestream[models]')")
NAMES = ("llama-3.2-1b", "qwen3-0.6b", "gpt2", "bert-base", "vit-base", "mixer-b16", "resnet50")


@pytest.fixture
def shares() -> ModuleType:

    return importlib.import_module("benchmarks.tables.shares")


@pytest.mark.parametrize("name", NAMES)
def test_values_with_random_weights(shares: ModuleType, fresh: None, name: str) -> None:
    """Within twice eager's error of float64, with the FFN as a region."""
    torch.manual_seed(0)
    before = len(prepare.analyses())
    model = shares.MODELS[name]
    module = shares.module(model, 1, tiny=True, device="cpu")
    (x,) = model.inputs(shares.Case(1, 3), tiny=True, device="cpu")
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream, options={"target": "reference"})(x).double()
        near = module(x).double()
        want = module.double()(x.double() if x.is_floating_point() else x)
    assert (got - want).norm() <= 2 * (near - want).norm()
    made = [[op.kind for op in r.program.stages[0].ops] for r in prepare.analyses()[before:] if not r.problem]
    assert name == "resnet50" or any(kinds.count("linear") > 1 for kinds in made)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "gpt2, constant weights", "bert-base", "vit-base"])
def test_the_ffn_of_every_layer_runs_at_real_widths(shares: ModuleType, name: str) -> None:
    """Norm, FFN and residual are one region with few rows; of what a layer multiplies by weights that is most."""
    model = shares.MODELS[name]
    row = shares.measured(model, model.cases[0])
    ffn = row.layers["FFN"]
    assert ffn.flops == ffn.regions == ffn.runs
    assert ffn.flops > 0.59 * row.of_layers.flops
    assert {"q, k, v", "output projection"} <= row.layers.keys()


def test_gpt2s_weights_are_not_worth_their_copies(shares: ModuleType) -> None:
    """Its FFN is a region all the same, and Inductor runs it."""
    ffn = shares.measured(shares.MODELS["gpt2"], shares.Case(16)).layers["FFN"]
    assert ffn.regions == ffn.flops and ffn.runs == 0 and list(ffn.reasons) == [shares.FASTER]


def test_attention_counts_apart(shares: ModuleType) -> None:
    """BERT's: two products of [128, 64] a head and layer, and nothing of them among the parts."""
    row = shares.measured(shares.MODELS["bert-base"], shares.Case(1, 128))
    assert row.attention == 12 * 12 * 2 * (2 * 128 * 128 * 64)
    assert row.whole.flops == 12 * 2 * 128 * 768 * (4 * 768 + 2 * 3072)


def test_token_mixing_is_no_attention(shares: ModuleType) -> None:
    row = shares.measured(shares.MODELS["mixer-b16"], shares.Case(32, 196))
    mixing = row.layers["token mixing"]
    assert row.attention == 0 and mixing.regions == mixing.flops > 0

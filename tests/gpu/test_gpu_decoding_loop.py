"""The loop of ``generate`` on a GPU: the tokens of transformers' own loop, whose steps are the same kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilestream
from tilestream.run.backend import tilestream as backend

pytestmark = pytest.mark.gpu


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])},
        {"do_sample": False, "eos_token_id": list(range(0, 1000, 40))},
    ],
    ids=["greedy", "sampled", "padded", "ends"],
)
def test_tokens(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Three calls, each with a cache of its own: the first compiles, the others capture at once."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1000, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    how = {"compile_config": transformers.CompileConfig(backend=backend, mode=None), "max_new_tokens": 24}
    given = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    for seed in range(3):
        prompt = torch.randint(1, 1000, (2, 6), device="cuda")
        made = []
        for loop in ({}, {"custom_generate": tilestream.decoding_loop}):
            torch.manual_seed(seed)
            made.append(module.generate(prompt, cache_implementation="static", **how, **given, **loop))
        assert torch.equal(*made)
    assert "not captured" not in caplog.text and "own loop" not in caplog.text

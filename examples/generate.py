"""Text from a decoder of transformers, a token at a time, its decode step as one kernel (docs/decoding.md).

    python examples/generate.py                          SmolLM-135M's shape, 64 tokens behind 16, greedy
    python examples/generate.py --layers 2 --width 128 --heads 2 --key-heads 1 --vocabulary 500 --tokens 4

Wants transformers; weights are random, nothing is downloaded, and the "text" is numbers. Without a GPU of ours
the step is computed by what its operator means, in PyTorch.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import tilestream  # noqa: F401  (the back end's name)


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 30), ("width", 576), ("heads", 9), ("key-heads", 3), ("vocabulary", 49152)):
        wanted.add_argument(f"--{name}", type=int, default=default)
    wanted.add_argument("--tokens", type=int, default=64)
    given = wanted.parse_args()
    try:
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        sys.exit(f"this example needs transformers ({missing}): pip install 'tilestream[models]'")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        num_hidden_layers=given.layers, hidden_size=given.width, intermediate_size=given.width * 8 // 3 // 8 * 8,
        num_attention_heads=given.heads, num_key_value_heads=given.key_heads, head_dim=64, vocab_size=given.vocabulary,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    options: dict[str, Any] = {"decode_step": True} | ({"target": "reference"} if device == "cpu" else {})
    step = torch.compile(model, backend="tilestream", options=options, dynamic=False)
    prompt = torch.randint(given.vocabulary, (1, 16), device=device)

    def logits_of(call: Any) -> tuple[torch.Tensor, list[int]]:
        """Of every token, those that eager chose: a token is another where two are alike."""
        cache = StaticCache(config=config, max_cache_len=16 + given.tokens)
        token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        found, chosen = [], []
        for n in range(given.tokens):
            found.append(call(token, past_key_values=cache).logits.float())
            chosen.append(int(token))
            token = found[-1].argmax(-1) if call is model else torch.tensor([[told[n]]], device=device)
        return torch.cat(found), chosen[1:] + [int(token)]

    told: list[int] = []
    with torch.no_grad():
        want, told = logits_of(model)
        got, _ = logits_of(step)
    alike = (got.argmax(-1) == want.argmax(-1)).float().mean()
    off = (got - want).norm() / want.norm()
    print(f"{given.tokens} tokens: {100 * off:.2f} % off eager, {alike:.0%} of the tokens alike; {told[:8]} ...")


if __name__ == "__main__":
    main()

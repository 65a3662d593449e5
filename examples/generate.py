"""Text from a decoder of transformers, a token at a time, its decode step as one kernel (docs/decoding.md).

    python examples/generate.py                          SmolLM-135M's shape, 64 tokens behind 16, greedy and sampled
    python examples/generate.py --layers 2 --width 128 --heads 2 --key-heads 1 --vocabulary 500 --tokens 4

Wants transformers; weights are random, nothing is downloaded, and the "text" is numbers. Without a GPU of ours
the step is computed by what its operator means, in PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch

import tilestream


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 30), ("width", 576), ("heads", 9), ("key-heads", 3), ("vocabulary", 49152)):
        wanted.add_argument(f"--{name}", type=int, default=default)
    wanted.add_argument("--tokens", type=int, default=64)
    given = wanted.parse_args()
    try:
        from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        sys.exit(f"this example needs transformers ({missing}): pip install 'tilestream[models]'")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        num_hidden_layers=given.layers, hidden_size=given.width, intermediate_size=given.width * 8 // 3 // 8 * 8,
        num_attention_heads=given.heads, num_key_value_heads=given.key_heads, head_dim=64, vocab_size=given.vocabulary,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).bfloat16().eval()
    model.to(device)
    options = {"target": "reference"} if device == "cpu" else {}
    how: dict[str, Any] = {"backend": "tilestream", "mode": None, "options": options}
    step: Any = CompileConfig(**how)
    step._compile_all_devices = True  # else generate compiles on GPUs alone
    prompt = torch.randint(1, given.vocabulary, (1, 16), device=device)
    exact, greedy = copy.deepcopy(model).float(), None
    for samples in (False, True):
        with torch.no_grad():
            made = model.generate(
                prompt, max_new_tokens=given.tokens, do_sample=samples, cache_implementation="static",
                compile_config=step, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            want = exact(made.sequences[:, :-1]).logits[0, 15:]
        got, chosen = torch.cat(made.logits), made.sequences[0, 16:]
        off = (got - want).norm() / want.norm()
        best = (chosen == want.argmax(-1)).float().mean()
        kind = "sampled" if samples else "greedy"
        told = f"{100 * off:.2f} % off float32 eager's logits, {best:.0%} of the tokens its best"
        print(f"{kind}, {given.tokens} tokens: {told}; {chosen[:8].tolist()} ...")
        greedy = made.sequences if greedy is None else greedy
    looped = model.generate(
        prompt, max_new_tokens=given.tokens, do_sample=False, cache_implementation="static", compile_config=step,
        custom_generate=tilestream.decoding_loop,
    )  # fmt: skip
    print(f"by our loop, greedy: {'the same' if torch.equal(looped, greedy) else 'other'} tokens")


if __name__ == "__main__":
    main()

"""Next tokens of Hugging Face's GPT-2 through ``torch.compile(backend="tilestream")``, against eager.

    python examples/hugging_face.py                      12 layers, a token of each of 16 sequences
    python examples/hugging_face.py --layers 1 --width 48 --hidden 520

Wants transformers; weights are random, nothing is downloaded. GPT-2's weights lie ``[in, out]``, and kernels read
``[out, in]``: ``constant_weights=True`` is the word that they do not change, so that they are copied once.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console

import tilestream

OPTIONS: dict[str, Any] = {"constant_weights": True}


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    wanted.add_argument("--layers", type=int, default=12)
    wanted.add_argument("--width", type=int, default=768)
    wanted.add_argument("--hidden", type=int, default=3072)
    wanted.add_argument("--batch", type=int, default=16)
    given = wanted.parse_args()
    try:
        from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        sys.exit(f"this example needs transformers ({missing}): pip install 'tilestream[models]'")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"n_layer": given.layers, "n_embd": given.width, "n_inner": given.hidden, "n_head": given.width // 12}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).to(device, torch.bfloat16).eval()
    tokens = torch.randint(1000, (given.batch, 1), device=device)
    fast = torch.compile(model, backend="tilestream", options=OPTIONS)
    with torch.no_grad(), Console(stderr=True).status("compiling: the first call"):
        want, got = (m(tokens, use_cache=False).logits.double() for m in (model, fast))
        off = ((got - want).norm() / want.norm()).item()
        plan = tilestream.explain(model, tokens, device="h200", options=OPTIONS, kwargs={"use_cache": False})
    flops = plan.json()["coverage"]["flops"]
    print(f"GPT-2: {100 * off:.2f} % off eager; {flops['dataflow'] / sum(flops.values()):.0%} of its FLOPs in kernels")


if __name__ == "__main__":
    main()

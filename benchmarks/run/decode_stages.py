"""Where the time of a decode step goes: its stages by the kernel's own stamps.

    python -m benchmarks.run.decode_stages                       SmolLM-135M, Qwen3-0.6B, Llama-3.2-1B, GPT-2
    python -m benchmarks.run.decode_stages qwen3-0.6b --batch 8
    python -m benchmarks.run.decode_stages --json FILE

Needs an H100 or H200. bf16, random weights, a token behind 479 in caches of 512. ``us`` is the kernel's without stamps,
a median of CUDA graphs; the rest is of one step with them, medians over layers, in microseconds. ``stage``: from the
last CTA's end of the stage in front to the last one's of this. ``hand_over``: from the same to when the last CTA has
its first values. ``rows``: from a CTA's first values to its last word, a median over CTAs, and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run.decode_step import MODELS, kernel_us, operands
from tilestream.bench.environment import environment
from tilestream.kernels.step.kernel import STAGES, StepKernel


def told(stamps: Tensor) -> dict[str, dict[str, float]]:
    """By stage what ``stamps`` say (``tilestream.cuda.step.stamps_of``): medians over layers, in microseconds."""
    us = stamps.double().cpu() / 1e3
    found: dict[str, list[tuple[float, ...]]] = {}
    before = None
    for layer in range(us.shape[1]):
        for stage, name in enumerate(STAGES):
            of = us[:, layer, stage]
            of = of[of[:, 2] > 0]
            if not len(of):
                continue
            rows = of[:, 2] - of[:, 1]
            if before is not None:
                times = (of[:, 2].max() - before, of[:, 1].max() - before, rows.median(), rows.max())
                found.setdefault(name, []).append((float(len(of)), *map(float, times)))
            before = of[:, 2].max()
    names = ("ctas", "stage", "hand_over", "rows", "most_rows")
    return {
        stage: dict(zip(names, map(statistics.median, zip(*layers, strict=True)), strict=True))
        for stage, layers in found.items()
    }


def measured(model: str, batch: int) -> dict[str, Any]:
    from tilestream.cuda.step import loaded

    shape = replace(MODELS[model], batch=batch)
    given = operands(shape)
    us = kernel_us(given)
    kernel = loaded(StepKernel(shape, stamps=True), 0)
    for _ in range(3):
        kernel(*given[:7], numbers=(0, *given[8:]))  # pyright: ignore[reportArgumentType]
    return {"model": model, "batch": batch, "us": us, "stages": told(kernel.stamps)}


def main() -> None:
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("models", nargs="*", default=list(MODELS))
    wanted.add_argument("--batch", type=int, default=1)
    wanted.add_argument("--json", type=Path)
    given = wanted.parse_args()
    rows = []
    for model in given.models:
        with torch.no_grad():
            rows.append(measured(model, given.batch))
        print(json.dumps(rows[-1]), flush=True)
        text = {"schema": 1, "environment": environment(), "rows": rows}
        if given.json:
            given.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

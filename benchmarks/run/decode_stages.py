"""Where the time of a decode step goes: its stages by the kernel's own stamps.

    python -m benchmarks.run.decode_stages                       SmolLM-135M, Qwen3-0.6B, Llama-3.2-1B, GPT-2
    python -m benchmarks.run.decode_stages qwen3-0.6b --batch 8
    python -m benchmarks.run.decode_stages --json FILE

Needs an H100 or H200. bf16, random weights, a token behind 479 in caches of 512. ``us`` is the kernel's without stamps,
``stamped_us`` with them, medians of CUDA graphs; the rest is of one step, by stage
(``tilestream.run.record_step.StageTimes``).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.run.decode_step import MODELS, PLACE
from tilestream.bench.environment import environment
from tilestream.run.record_step import record_step


def measured(model: str, batch: int) -> dict[str, Any]:
    run = record_step(replace(MODELS[model], batch=batch), PLACE)
    stages = {name: asdict(times) for name, times in run.by_stage().items()}
    return {"model": model, "batch": batch, "us": run.time_us, "stamped_us": run.stamped_us, "stages": stages}


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

"""Table of single layers in docs/few-rows-results.md, from ``benchmarks/results/projections.json``."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.lib.marked import table
from benchmarks.lib.places import RESULTS

RESULT = RESULTS / "projections.json"
OTHERS = {"eager": "eager", "inductor": "Inductor", "max-autotune": "max-autotune"}
TITLES = {
    "llama-qkv": "Llama-3.2-1B: norm, q, k, v",
    "qwen-qkv": "Qwen3-0.6B: norm, q, k, v",
    "bert-qkv": "BERT: q, k, v",
    "vit-qkv": "ViT: norm, q, k, v",
    "gpt2-qkv": "GPT-2: norm, one product",
    "llama-o": "Llama-3.2-1B, output",
    "qwen-o": "Qwen3-0.6B, output",
    "bert-o": "BERT, output and residual",
    "gpt2-o": "GPT-2, output",
}
HEADS = ("layer", "rows", "other", "", "one kernel", "gain", "split", "predicted", "with PDL")


def layers() -> str:
    """Microseconds with weights from DRAM: the best other, and the best of ours launched as others are."""
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    lines = []
    for name in TITLES:
        for count in sorted({r["rows"] for r in rows if r["layer"] == name}):
            found = [r for r in rows if (r["layer"], r["rows"]) == (name, count)]
            other = min((r for r in found if r["arm"] in OTHERS), key=_us)
            ours = [r for r in found if r["predicted_us"] is not None]
            best = min((r for r in ours if "dependent" not in r["arm"]), key=_us)
            early = min((f"{_us(r):.2f}" for r in ours if "dependent" in r["arm"]), default="-")
            cells = [TITLES[name], str(count), f"{_us(other):.2f}", OTHERS[other["arm"]], f"{_us(best):.2f}"]
            cells += [f"{_us(other) / _us(best):.2f}", best["arm"], f"{best['predicted_us']:.1f}", early]
            lines.append(cells)
    return table(HEADS, lines) if rows else "Not measured."


def _us(row: dict[str, Any]) -> float:
    return float(row["cold_us"])

"""Whole models of transformers and timm, for README and docs/results.md, from ``benchmarks/results/real``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from statistics import geometric_mean
from typing import Any

from benchmarks.lib.full_models import INFERENCE, FullModel
from benchmarks.lib.marked import table, us
from benchmarks.lib.places import RESULTS
from benchmarks.tables import prose

WANTED_US = {
    "bert-base": 520,
    "vit-b16": 740,
    "vit-tiny16": 680,
    "swin-t": 1000,
    "mixer-s16": 900,
    "gpt2": 690,
    "convnext-t": 1450,
    "efficientnet-b0": 1500,
    "swiglu-f32": 180,
    "cross-network": 130,
    "two-towers": 150,
}
"""Microseconds that we set out to reach."""
ROWS = {"swiglu-f32": 24_579, "cross-network": 16_384, "two-towers": 98_304}
NONE = "No results yet: `python -m benchmarks.run.real_models seen fresh` on an H200 makes them."


def title(model: FullModel) -> str:
    """Its name, and on what it was timed."""
    if model.tokens:
        return f"{model.name}, {model.batch} x {model.tokens} tokens"
    return f"{model.name}, {model.batch} images" if model.batch else f"{model.name}, {ROWS[model.name]:,} rows"


def found(models: Mapping[str, FullModel]) -> dict[str, dict[str, Any]]:
    """What was told of each of the models, the ones that could not be timed too."""
    paths = {name: RESULTS / "real" / f"{name}.json" for name in models}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def gains(models: Mapping[str, FullModel]) -> dict[str, float]:
    """The best of the others over ours, by title, of those that were timed."""
    return {title(models[name]): row["speedup"] for name, row in found(models).items() if "speedup" in row}


def lines(models: Mapping[str, FullModel]) -> str:
    """Microseconds of every arm, and below the mean of the gains, of first calls, and what was not timed."""
    rows = found(models)
    timed = {name: row for name, row in rows.items() if "speedup" in row}
    if not timed:
        return NONE
    wanted = WANTED_US.keys() & timed.keys()
    heads = ["model (bf16)", "eager", "Inductor", "tilestream", *(["wanted"] if wanted else []), "gain"]
    heads += ["over the floor", "error / eager's", "first call (s): Inductor / tilestream"]
    made = [_cells(models[name], row, bool(wanted)) for name, row in timed.items()]
    least = min(timed, key=lambda name: timed[name]["speedup"])
    told = [f"Geometric mean of the gains: {_mean(timed.values())}, of {len(timed)} of {len(models)}; the least:"]
    told += [f"{timed[least]['speedup']:.3f} ({least})."]
    if wanted:
        met = [name for name in timed if timed[name]["us"]["tilestream"] <= WANTED_US.get(name, 0.0)]
        told += [f"As fast as wanted: {len(met)} of {len(wanted)} ({', '.join(met)})."]
    told += [f"First calls: {_first(timed.values())} of Inductor's in the geometric mean.", *_missing(models, rows)]
    return f"{table(heads, made)}\n\n{prose.wrapped(' '.join(told))}"


def all_of_them() -> str:
    """One line over all sets of inference."""
    timed = [row for models in INFERENCE.values() for row in found(models).values() if "speedup" in row]
    if not timed:
        return NONE
    said = f"Over all {len(timed)}: gains {_mean(timed)}, first calls {_first(timed)} of Inductor's (geometric means)."
    return prose.wrapped(said)


def _cells(model: FullModel, row: Mapping[str, Any], wanted: bool) -> list[str]:
    times = row["us"]
    cells = [title(model), *(us(times.get(arm)) for arm in ("eager", "inductor")), f"**{us(times['tilestream'])}**"]
    cells += [us(WANTED_US.get(model.name))] if wanted else []
    floor = row.get("floor_us")
    cells += [f"{row['speedup']:.2f}", f"{times['tilestream'] / floor:.1f}" if floor else "-"]
    said = "error_ratio" in row and row["errors"]["eager"] > 0  # zeros are exact: that says nothing
    first = (f"{row['first_s'][arm]:.0f}" if arm in row["first_s"] else "-" for arm in ("inductor", "tilestream"))
    return [*cells, f"{row['error_ratio']:.2f}" if said else "-", " / ".join(first)]


def _mean(rows: Iterable[Mapping[str, Any]]) -> str:
    return f"{geometric_mean(row['speedup'] for row in rows):.2f}"


def _first(rows: Iterable[Mapping[str, Any]]) -> str:
    seconds = [row["first_s"] for row in rows if {"inductor", "tilestream"} <= row["first_s"].keys()]
    return f"{geometric_mean(s['tilestream'] / s['inductor'] for s in seconds):.2f}"


def _missing(models: Mapping[str, FullModel], rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each reason for which models were not timed."""
    reasons: dict[str, list[str]] = {}
    for name in models:
        if "speedup" not in rows.get(name, {}):
            why = "; ".join(rows[name]["failed"].values()) if name in rows else "not tried"
            reasons.setdefault(why, []).append(name)
    return [f"**Not measured: {', '.join(names)}** (`{why}`)." for why, names in reasons.items()]

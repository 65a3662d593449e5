"""README's first table: gains by kind of model, with the least of each and where it is, from ``benchmarks/results``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.lib.cases import MAIN, OTHERS, Case
from benchmarks.lib.full_models import DRAWN, DRAWN_STEPS, FRESH, MODELS, TRAINED
from benchmarks.lib.places import RESULTS
from benchmarks.tables import decoder_tables, real_tables

APPLICATIONS = {
    "NeRF": ("nerf_65536", "nerf_65536"),
    "MeshGraphNets": ("mgn", "mgn"),
    "GraphCast": ("graphcast_small", "graphcast_small_4"),
    "DLRM": ("dlrm_2048", "dlrm_2048"),
    "Llama layer": ("llama_layer", "llama_layer"),
}
"""Kitsune's five, each at one size: the file of its inference and its case among the training steps."""


@dataclass(frozen=True)
class Gain:
    """The time of the best of the others divided by ours, and the same against the fastest of Inductor's runs."""

    last: float
    least: float

    def __str__(self) -> str:
        return f"{self.last:.2f}" + ("" if self.least == self.last else f" ({self.least:.2f})")


def gain(made: Mapping[str, Any]) -> Gain:
    """Of a result with ``speedup``, ``arms`` and perhaps ``inductor_us_of_runs``."""
    ours = made["arms"]["tilestream"]["us"]
    runs = made.get("inductor_us_of_runs")
    return Gain(made["speedup"], min(made["speedup"], min(runs) / ours) if runs else made["speedup"])


def mean(gains: Sequence[Gain]) -> Gain:
    """Geometric means of both figures."""
    return Gain(geometric_mean(g.last for g in gains), geometric_mean(g.least for g in gains))


def training_rows() -> dict[str, dict[str, Any]]:
    """Training steps by the name of their case."""
    return {row["case"]: row for row in (_read("training.json") or {"rows": []})["rows"]}


def applications() -> dict[str, tuple[Gain | None, Gain | None]]:
    """The five applications: gains of inference and of a training step, None where one was not timed."""
    steps = training_rows()
    found = {title: (_read(f"whole/{file}.json"), steps.get(step)) for title, (file, step) in APPLICATIONS.items()}
    return {title: (gain(a) if a else None, gain(b) if b else None) for title, (a, b) in found.items()}


def published() -> dict[str, dict[str, Any]]:
    """Whole models of other libraries by name that were timed of an earlier version alone."""
    return {row["model"]: row for row in (_read("published_models.json") or {"rows": []})["rows"]}


def over_best(us: Mapping[str, float]) -> float:
    """The best of the others' times divided by ours."""
    return min(time for arm, time in us.items() if arm != "tilestream") / us["tilestream"]


def rows() -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each kind of model: how many cases, the geometric mean and the range of gains, and where
    the least is; whole applications against the fastest of Inductor's runs."""
    five = applications()
    kinds: dict[str, dict[str, float]] = {
        "whole models of transformers and timm, drawn by lot, never looked at": real_tables.gains(DRAWN),
        "the same, and three small networks, looked at or tuned on": real_tables.gains({**FRESH, **MODELS}),
        "training steps of some of them, the first eight drawn by lot": real_tables.gains({**DRAWN_STEPS, **TRAINED}),
        "whole decoders, a token a step, never tuned on": dict(_steps("decode_unseen.json")),
        "whole decoders, a token of each of 1 to 32 sequences": dict(_steps("decode_step.json")),
        "row chains: MLPs, NeRF, edge blocks of GNNs": dict(_cases(MAIN)),
        "ten other small models": dict(_cases(OTHERS)),
        "whole applications, inference, Inductor at its fastest": {
            title: g.least for title, (g, _) in five.items() if g
        },
        "the same, a training step": {title: g.least for title, (_, g) in five.items() if g},
        "decoders of one token, BERT (two layers)": {
            f"{case}, {count:,} rows": decoder_tables.gain(arms)
            for (case, count), arms in decoder_tables.timed("layers").items()
        },
        "pipelines over SMs, against one fused kernel and Inductor": dict(_spatial()),
    }
    lines = []
    for kind, gains in kinds.items():
        if not gains:
            continue
        least = min(gains, key=lambda name: gains[name])
        span = f"{gains[least]:.2f} to {max(gains.values()):.2f}"
        lines.append([kind, str(len(gains)), f"{geometric_mean(gains.values()):.2f}", span, least])
    return ["kind", "cases", "mean gain", "from, to", "least with"], lines


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _cases(cases: Sequence[Case]) -> Iterator[tuple[str, float]]:
    for case in cases:
        made = _read(case.path.name)
        if made is not None and made["speedup"] is not None:
            yield f"{case.title}, {made['rows']:,} rows", made["speedup"]


def _steps(name: str) -> Iterator[tuple[str, float]]:
    """Of whole models of ``benchmarks.run.decode_step`` the best of the others over ours, as it is by default."""
    for case, made in (_read(name) or {"cases": {}})["cases"].items():
        us = {arm["arm"]: arm["us"] for arm in made["arms"]}
        ours = us.pop("tilestream, decode step")
        del us["tilestream"]
        name, _, sequences = case.partition("*")
        yield f"{name}, {sequences} sequences" if sequences else name, min(us.values()) / ours


def _spatial() -> Iterator[tuple[str, float]]:
    """Of each case of ``spatial_wins.json`` the best other way to run it over the best pipeline of several stages."""
    timed: dict[str, dict[bool, list[float]]] = {}
    for row in (_read("spatial_wins.json") or {"rows": []})["rows"]:
        if row["measured_us"]:
            kinds = timed.setdefault(f"{row['case']}, {row['rows']:,} rows", {True: [], False: []})
            kinds[row["kind"].startswith("spatial")].append(row["measured_us"])
    for case, kinds in timed.items():
        if all(kinds.values()):
            yield case, min(kinds[False]) / min(kinds[True])

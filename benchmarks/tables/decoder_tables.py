"""Rows of the tables of decoders, BERT and their blocks, from ``benchmarks/results/decoders.json`` and what its options
gained (``decoder_options.json``); pages are written by ``flashfuser_tables.py`` and ``make_tables.py``."""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import Any

from benchmarks.lib.places import RESULTS

OTHERS = {"eager": "eager", "inductor": "Inductor", "max-autotune": "max-autotune"}
OURS = "tilestream"
OPTIONS = ("neither", "attention", "early launch", "both")

Table = tuple[list[str], list[list[str]]]
"""Headings and rows."""


def timed(word: str) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """The arms of every case of which ours was timed, whose details have ``word``: ``blocks`` or ``layers``."""
    path = RESULTS / "decoders.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for r in rows:
        if word in r["detail"]:
            found.setdefault((r["case"], r["rows"]), {})[r["arm"]] = r
    return {case: arms for case, arms in sorted(found.items()) if OURS in arms}


def gain(arms: dict[str, dict[str, Any]]) -> float:
    """How many times as long the best of the others takes."""
    return min(arms[arm]["us"] for arm in OTHERS if arm in arms) / arms[OURS]["us"]


def compiled(word: str) -> Table:
    """Microseconds of a call in every arm."""
    lines = []
    for (case, count), arms in timed(word).items():
        cells = [f"{arms[arm]['us']:.1f}" if arm in arms else "-" for arm in (*OTHERS, OURS)]
        lines.append([case, f"{count:,}", *cells, f"{gain(arms):.2f}"])
    return ["", "rows", *OTHERS.values(), OURS, "gain"], lines


def against_tuned() -> str:
    """The cases in which max-autotune was timed, as a sentence; empty where there are none."""
    tuned = [arms for arms in timed("layers").values() if "max-autotune" in arms]
    if not tuned:
        return ""
    times = [arms["max-autotune"]["us"] / arms[OURS]["us"] for arms in tuned]
    return (
        f"Against max-autotune alone ({len(times)} cases): {min(times):.2f} to {max(times):.2f} times, geometric mean"
        f" {geometric_mean(times):.2f}."
    )


def options() -> Table:
    """Microseconds with and without attention of ours and early launches."""
    rows = json.loads((RESULTS / "decoder_options.json").read_text(encoding="utf-8"))["rows"]
    lines = []
    for r in rows:
        cells = [f"{r['us'][option]:.1f}" if option in r["us"] else "-" for option in OPTIONS]
        lines.append([r["case"], f"{r['rows']:,}", *cells])
    return ["", "rows", *OPTIONS], lines

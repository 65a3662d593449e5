"""Why our figures differ from the paper's: one text a row of Table 2 and a figure of the text.

A text is shown only where ours really differs, so that it cannot outlive the difference it explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilestream.kitsune.paper import Figure

TRAFFIC_SLACK = 5.0
"""Percentage points of off-chip traffic that count as the same."""

ROWS: dict[str, str] = {}
"""By ``app mode``."""

FIGURES: dict[str, str] = {}
"""By key of ``paper.FIGURES``."""


def row(made: Mapping[str, Any]) -> str:
    """Why this row of Table 2 differs; empty where counts are equal and traffic is within ``TRAFFIC_SLACK``."""
    return ROWS.get(f"{made['app']} {made['mode']}", "") if differs(made) else ""


def differs(made: Mapping[str, Any], slack: float = TRAFFIC_SLACK) -> bool:
    """Whether a count of the row is another than the paper's, or a traffic reduction is off by more than ``slack``."""
    stated = made["paper"]
    counts = any(made[n] != stated[n] for n in ("operators", "fused_vertical", "fused_kitsune"))
    return counts or any(abs(made[n] - stated[n]) > slack for n in ("traffic_vertical", "traffic_kitsune"))


def figure(stated: Figure, ours: tuple[float, float]) -> str:
    """Why this figure differs; empty where ours lies within what the paper states."""
    return "" if stated.holds(*ours) else FIGURES.get(stated.key, "")

"""The table of launches in docs/training-results.md: predicted and measured times, in the five applications."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.lib.places import RESULTS

KINDS = {"region": "region", "gradients": "gradients of weights", "interaction": "interaction"}


def launches() -> list[list[str]]:
    """A row for each different launch of a model: the model, what it is, how many are equal, predicted and measured
    microseconds on one H200, and the error of the prediction."""
    rows = []
    for title, found in _models():
        equal = Counter(filter(None, map(_launch, found)))
        for (what, chosen, predicted, measured), count in equal.items():
            off = f"{predicted / measured - 1:+.0%}"
            rows.append([title, what, chosen, str(count), f"{predicted:.1f}", f"{measured:.1f}", off])
    return rows


def _models() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in sorted((RESULTS / "whole").glob("*.json")):
        made = json.loads(path.read_text())
        if found := made.get("launches"):
            yield f"{path.stem}, inference", found
    steps = RESULTS / "training.json"
    for row in json.loads(steps.read_text())["rows"] if steps.exists() else ():
        if found := row.get("launches"):
            yield f"{row['case']}, step", found


def _launch(told: dict[str, Any]) -> tuple[str, str, float, float] | None:
    """What a launch is, how it runs, and its times; None where it was not timed."""
    times = {name: (predicted, measured) for name, predicted, measured, _ in told["candidates"]}
    predicted, measured = times.get(told["chosen"], (None, None))
    if predicted is None or measured is None:
        return None
    kind = KINDS[told["name"].rstrip("0123456789").rsplit(".", 1)[-1]]
    return f"{kind}, {told['operators']} operators", told["chosen"], predicted, measured

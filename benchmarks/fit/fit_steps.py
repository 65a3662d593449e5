"""The coefficient of a decode step's words (``simulator/steps``) from measured kernels.

    python -m benchmarks.fit.fit_steps

Least squares of logarithms over the cases of ``FITTED`` in ``benchmarks/results/decode_step.json``, and how far the
prediction is off on all, with it and with what the simulator has. Needs no GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

from benchmarks.run.decode_step import MODELS
from tilestream.devices import H200
from tilestream.kernels.step.shape import Shape
from tilestream.simulator import steps

RESULTS = Path(__file__).parents[1] / "results" / "decode_step.json"
FITTED = ("qwen3-0.6b*8", "qwen3-0.6b*32")
TRIED = [n / 20 for n in range(0, 101)]


def measured() -> dict[str, tuple[Shape, float]]:
    """By case a shape, and microseconds of its kernel."""
    cases = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    found = {}
    for case, row in cases.items():
        name, _, batch = case.partition("*")
        if "kernel" in row:
            found[case] = (replace(MODELS[name], batch=int(batch or 1)), row["kernel"]["kernel_us"])
    return found


def ratios(words: float) -> dict[str, float]:
    """By case what is predicted, over what was measured."""
    own, steps.WORDS = steps.WORDS, words
    try:
        return {case: steps.simulate_step(shape, H200).time_us / us for case, (shape, us) in measured().items()}
    finally:
        steps.WORDS = own


def fitted() -> float:
    return min(TRIED, key=lambda words: sum(log(ratio) ** 2 for case, ratio in ratios(words).items() if case in FITTED))


def main() -> None:
    best = fitted()
    for words, name in ((best, "fitted"), (steps.WORDS, "in use")):
        told = (f"{case} {ratio:.2f}{' (fitted on)' * (case in FITTED)}" for case, ratio in ratios(words).items())
        print(f"{words} {name}: predicted over measured " + ", ".join(told))


if __name__ == "__main__":
    main()

"""The coefficient of a decode step's words (``simulator/steps``) from measured kernels.

    python -m benchmarks.fit.fit_steps

Least squares of logarithms over the cases of ``FITTED`` in ``benchmarks/results/decode_step.json``, and how far the
prediction is off on all, with it and with what the simulator has. Needs no GPU.
"""

from __future__ import annotations

import json
from functools import cache
from math import log

from benchmarks.lib.places import RESULTS
from benchmarks.run.decode_step import shape_of
from tilestream.devices import H200
from tilestream.simulator.steps import WORDS, simulate_step

FITTED = ("qwen3-0.6b*8", "qwen3-0.6b*32")
TRIED = [n / 20 for n in range(0, 101)]


@cache
def measured() -> dict[str, float]:
    """By case microseconds of its kernel."""
    cases = json.loads((RESULTS / "decode_step.json").read_text(encoding="utf-8"))["cases"]
    return {case: row["kernel"]["kernel_us"] for case, row in cases.items() if "kernel" in row}


def ratio(case: str, words: float) -> float:
    """What is predicted, over what was measured."""
    return simulate_step(shape_of(case), H200, words).time_us / measured()[case]


def fitted() -> float:
    return min(TRIED, key=lambda words: sum(log(ratio(case, words)) ** 2 for case in FITTED))


def main() -> None:
    best = fitted()
    for words, name in ((best, "fitted"), (WORDS, "in use")):
        told = (f"{case} {ratio(case, words):.2f}{' (fitted on)' * (case in FITTED)}" for case in measured())
        print(f"{words} {name}: predicted over measured " + ", ".join(told))


if __name__ == "__main__":
    main()

"""Are plans for devices that nobody has the best by the time that is shown, and is a better device ever slower?

    python -m benchmarks.fit.scaled_devices                      print the counts and every case
    python -m benchmarks.fit.scaled_devices --json FILE          write them too
    python -m benchmarks.fit.scaled_devices --models nerf,chain  only these models

Every model of ``tilestream.apps`` at four numbers of rows is planned for an H200 and for devices that are better in one
number. A choice is wrong if another candidate of its region takes less by more than 2 %, by the time that ``explain``
prints. A device is slower if the whole model, planned anew for it, takes over 2 % longer than on the one it is scaled
from; of the plan as it was on that one, the same is counted apart. Nothing is measured: no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilestream import devices
from tilestream.apps import APPS
from tilestream.devices import Device
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.predicted import replan

BASE = "h200"
ROWS = (128, 4096, 32_768, 262_144)
TOLERANCE = 1.02
LADDERS = (
    ("sms*1.25", "sms*2", "sms*4", "sms*8"),
    ("l2_bytes_per_s*2", "l2_bytes_per_s*4"),
    ("clock_hz*1.5", "clock_hz*4"),
    ("tensor_flops*2", "tensor_flops*4"),
    ("dram_bytes_per_s*1.25",),
    ("l2_bytes*4",),
    ("launch_s*0.2",),
    ("sms*2+l2_bytes_per_s*2", "sms*4+l2_bytes_per_s*4"),
)
"""Each is better than the one before it, and the first than ``BASE``."""


@dataclass(frozen=True)
class Choice:
    """A region's choice on a device: the chosen candidate, the best one by what is shown, and both times."""

    model: str
    rows: int
    device: str
    region: str
    chosen: str
    chosen_us: float
    best: str
    best_us: float

    @property
    def factor(self) -> float:
        return self.chosen_us / self.best_us


@dataclass(frozen=True)
class Step:
    """A whole model on a device and on a better one: planned anew, and with the plan as it was."""

    model: str
    rows: int
    device: str
    better: str
    us: float
    replanned_us: float
    kept_us: float

    @property
    def factor(self) -> float:
        return self.replanned_us / self.us

    @property
    def kept_factor(self) -> float:
        return self.kept_us / self.us


def choices(model: str, rows: int, planned: Analysis) -> Iterator[Choice]:
    """Every region that has a plan."""
    for region in planned.regions:
        if region.plan is None:
            continue
        times = [(us, c) for c in region.plan.candidates if (us := planned.candidate_us(region, c)) is not None]
        best_us, best = min(times, key=lambda each: each[0])
        chosen_us = next(us for us, c in times if c == region.plan.chosen)
        chosen = region.plan.chosen.name
        yield Choice(model, rows, planned.device, region.name, chosen, chosen_us, best.name, best_us)


def kept_us(planned: Analysis, device: Device) -> float | None:
    """Predicted microseconds of the model on ``device`` with the plans of another."""
    from dataclasses import replace

    return replace(planned, device=device.name, hardware=device).predicted_us


def cases(models: Sequence[str], every_rows: Sequence[int]) -> Iterator[tuple[list[Choice], list[Step]]]:
    """What a model at a number of rows came to, one after another."""
    for model in models:
        for rows in every_rows:
            module, inputs = APPS[model].make(rows)
            found = {BASE: analyse(module, inputs, Options(measure=False, cache=False), devices.get(BASE))}
            made, steps = list(choices(model, rows, found[BASE])), []
            for ladder in LADDERS:
                before = BASE
                for variant in ladder:
                    device = devices.get(f"{BASE}+{variant}")
                    found[device.name] = after = replan(found[BASE], device)
                    made += choices(model, rows, after)
                    us, again = found[before].predicted_us, after.predicted_us
                    kept = kept_us(found[before], device)
                    if us is not None and again is not None and kept is not None:
                        steps.append(Step(model, rows, before, device.name, us, again, kept))
                    before = device.name
            yield made, steps


def summary(made: Sequence[Choice], steps: Sequence[Step]) -> dict[str, object]:
    """The counts, on the base and on what is scaled from it."""
    apart = [c for c in made if c.device != BASE]
    wrong = [c for c in apart if c.factor > TOLERANCE]
    slower = [s for s in steps if s.factor > TOLERANCE]
    kept = [s for s in steps if s.kept_factor > TOLERANCE]
    return {
        "choices on the base": sum(c.device == BASE for c in made),
        "wrong on the base": sum(c.device == BASE and c.factor > TOLERANCE for c in made),
        "choices on scaled devices": len(apart),
        "wrong on scaled devices": len(wrong),
        "mean factor of the wrong": sum(c.factor for c in wrong) / len(wrong) if wrong else 1.0,
        "largest factor of the wrong": max((c.factor for c in wrong), default=1.0),
        "better devices": len(steps),
        "slower when planned anew": len(slower),
        "largest factor when planned anew": max((s.factor for s in steps), default=1.0),
        "slower with the plan as it was": len(kept),
        "largest factor with the plan as it was": max((s.kept_factor for s in steps), default=1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(APPS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    given = parser.parse_args()
    start = time.process_time()
    made: list[Choice] = []
    steps: list[Step] = []
    for some, others in cases(given.models.split(","), [int(n) for n in given.rows.split(",")]):
        made += some
        steps += others
    for c in made:
        if c.factor > TOLERANCE:
            print(
                f"wrong: {c.model} {c.rows:,} rows on {c.device}, {c.region}: {c.chosen} {c.chosen_us:.1f} us, "
                f"{c.best} {c.best_us:.1f} us, {c.factor:.2f}"
            )
    for s in steps:
        if s.factor > TOLERANCE or s.kept_factor > TOLERANCE:
            print(
                f"slower: {s.model} {s.rows:,} rows, {s.device} {s.us:.1f} us, {s.better} {s.replanned_us:.1f} us "
                f"({s.factor:.2f}), with the plan as it was {s.kept_us:.1f} us ({s.kept_factor:.2f})"
            )
    told = summary(made, steps)
    print("\n".join(f"{name}: {value:.3g}" for name, value in told.items()))
    print(f"{time.process_time() - start:.0f} CPU s")
    if given.json is not None:
        wrong = [asdict(c) for c in made if c.factor > TOLERANCE]
        slower = [asdict(s) for s in steps if s.factor > TOLERANCE or s.kept_factor > TOLERANCE]
        given.json.write_text(json.dumps({"summary": told, "wrong": wrong, "slower": slower}, indent=1) + "\n")


if __name__ == "__main__":
    main()

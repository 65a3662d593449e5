"""Record what every warp of a pipeline does when, and lay it beside what the simulator predicted.

    python examples/recorded_timeline.py [FOLDER]     writes FOLDER/timeline.json

On a GPU the pipeline is planned for it and runs there. Without one the same kernels run on CPU threads, for a device of
few SMs: then who waits for whom is real and the times mean nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from tilestream import cuda, devices
from tilestream.cuda.host.build import stamped_on_host
from tilestream.cuda.recording import CONSUMERS, STEP, WAIT, of_logs
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.report import timeline
from tilestream.report.accounts import compare
from tilestream.run.record import random_tensors, record
from tilestream.simulator import simulate


def main(folder: Path, rows: int = 1000) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers).bfloat16().eval()
    why_not = cuda.available()
    device = devices.get("h200").with_sms(4) if why_not else devices.detect()
    assert device is not None
    with torch.no_grad():
        found = analyse(model, (torch.empty(rows, 64).bfloat16(),), Options(strategy="spatial"), device)
    plan = found.regions[0].plan
    assert plan is not None and plan.chosen.pipeline is not None
    pipeline = plan.chosen.pipeline

    print("compiling the kernels, then running them", file=sys.stderr)
    if why_not:
        print(f"on CPU threads, {why_not}")
        _, logs = stamped_on_host(pipeline, random_tensors(pipeline, rows, torch.device("cpu")))
        run = of_logs(pipeline, logs, "CPU threads")
    else:
        run = record(pipeline, rows)
        print(f"{run.time_us:.1f} us, with stamps {run.stamped_us:.1f} us")

    steps = [s for s in run.slices if s.kind == STEP]
    print(f"{len(steps)} steps of {len(pipeline.stages)} stages; what their warpgroups waited for, in microseconds:")
    waits: dict[str, float] = {}
    for s in run.slices:
        if s.kind == WAIT and s.role < CONSUMERS:
            waits[s.name] = waits.get(s.name, 0.0) + s.end_us - s.start_us
    for name, us in sorted(waits.items(), key=lambda item: -item[1]):
        print(f"  {name}: {us:.1f}")

    simulated = simulate(pipeline, rows, device)
    for c in compare(simulated, run):
        work = c.simulated.us["work"], c.measured.us["work"]
        print(f"{c.measured.stage}: work of a mean SM {work[0]:.1f} us simulated, {work[1]:.1f} us measured")
    path = timeline.write(folder / "timeline.json", {"three layers": simulated}, {"three layers": run})
    print(f"both timelines, for ui.perfetto.dev: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))

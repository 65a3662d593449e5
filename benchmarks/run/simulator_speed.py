"""Events per second of the simulator, on one core: a pipeline of two stages, and a kernel of many CTAs.

    python -m benchmarks.run.simulator_speed              print a table
    python -m benchmarks.run.simulator_speed --json FILE  write it too

CPU seconds of the event loop with its tables, after a run that compiles it. Costs grow with events: the rate stays.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numba

from tilestream import devices
from tilestream.simulator import run
from tilestream.simulator.workload import Engine, SimLaunch, SimQueue, SimStage, TileWork, Workload

A100 = devices.get("a100")


def pipeline(tiles: int) -> SimLaunch:
    tensor = TileWork(tensor_flops=8.4e6, l2_read=65_536, dram_read=16_384)
    simt = TileWork(simt_ops=2.6e5, l2_write=32_768, dram_write=32_768)
    stages = (
        SimStage("tensor", Engine.TENSOR, tiles, 108, tensor, registers=32_768),
        SimStage("simt", Engine.SIMT, tiles, 108, simt, registers=32_768),
    )
    return SimLaunch("pipeline", stages, (SimQueue("tensor", ("simt",), 65_536),))


def kernel(tiles: int) -> SimLaunch:
    work = TileWork(simt_ops=5e4, l2_read=65_536, dram_read=65_536, l2_write=32_768, dram_write=32_768)
    return SimLaunch("kernel", (SimStage("simt", Engine.SIMT, tiles, tiles, work, registers=32_768),))


def measure(launch: SimLaunch) -> dict[str, float | str]:
    start = time.process_time()
    made = run(Workload(launch.name, (launch,)), A100, most_tiles=10**9)
    seconds = time.process_time() - start
    return {"case": launch.name, "tiles": made.tiles, "events": made.events, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for make in (pipeline, kernel):
        measure(make(500))
    rows = [measure(make(tiles)) for make in (pipeline, kernel) for tiles in (10_000, 100_000, 1_000_000)]
    print(f"{'case':10s} {'tiles':>10s} {'events':>10s} {'CPU s':>8s} {'events/s':>10s}")
    for row in rows:
        row["events_per_s"] = float(row["events"]) / float(row["seconds"])
        print(
            f"{row['case']:10s} {row['tiles']:>10,} {row['events']:>10,} {row['seconds']:8.3f} "
            f"{row['events_per_s']:10,.0f}"
        )
    if given.json is not None:
        data = {"python": platform.python_version(), "numba": numba.__version__, "rows": rows}
        given.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

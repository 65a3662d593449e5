"""compute-sanitizer over one test for each shape of kernel. Needs an H100 or H200. No test traps on purpose.

    python tests/gpu/sanitize.py memcheck                    also initcheck, synccheck, racecheck
    python tests/gpu/sanitize.py racecheck --every-lane      kernels in which every lane arrives (every_lane.py)
    python tests/gpu/sanitize.py memcheck --only gathers     some shapes

Prints what each shape's process reported, and exits with 1 where there is anything.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNELS = "test_gpu_kernels.py::test_named_pipelines"
SHAPES = {
    "row streams": [f"{KERNELS}[{n}]" for n in ("chain", "chain_tf32", "chain_resident", "nerf", "edge_block_512")],
    "tiles by columns": [f"{KERNELS}[{n}]" for n in ("narrow_by_columns", "views_by_columns", "wide")],
    "pairs of CTAs": [f"{KERNELS}[{n}]" for n in ("chain_pairs", "odd_widths_pairs_f16")],
    "odd rows": [f"{KERNELS}[{n}]" for n in ("odd_widths", "views", "mixed_odd_inputs", "mixed_slices_of_fp32")],
    "queues in L2": [f"{KERNELS}[{n}]" for n in ("spatial_chain", "spatial_multicast", "spatial_heads_f16")],
    "queues in DRAM": [f"{KERNELS}[{n}]" for n in ("bulk_chain", "bulk_odd_f16", "l2_and_dram")],
    "stamps": ["test_gpu_stamps.py::test_recordings[spatial_chain]"],
    "gathers": [f"test_gpu_gathers.py::test_against_the_reference_machine[{n}]" for n in ("message128", "f32")],
    "taps of pixels": [
        f"test_gpu_convolutions.py::test_against_the_reference_machine[{n}]" for n in ("same-64-lanes", "same-64-bulk")
    ],
    "blocks": [f"test_gpu_blocks.py::test_kernels[{n}]" for n in ("norm-1", "points-1", "streamed-2")],
    "shared tiles": ["test_gpu_shared_tile.py::test_every_tail_and_any_number_of_rows", "-k", "[63-"],
    "collectives": ["test_gpu_collectives.py::test_values"],
    "stationary sums": [f"test_gpu_stationary.py::test_gradients[{n}]" for n in ("one CTA", "ragged", "odd rows")],
    "sums by segments": [f"test_gpu_messages.py::test_{n}" for n in ("sums", "rows_that_the_order_names_anyhow")],
    "interactions": [
        f"test_gpu_interaction.py::test_{n}" for n in ("values", "rows_with_gaps_and_rows_that_start_anywhere")
    ],
}  # fmt: skip
FOUND = re.compile(r"^=+ (?:Error|Warning|Invalid|Uninitialized|Barrier|Trace|Misaligned|Race|Divergent|Potential).*")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)


def run(tool: str, shape: str, tests: list[str], plugins: list[str]) -> tuple[str, bool]:
    """What a process of one shape's tests reported, and whether that is nothing."""
    start = time.perf_counter()
    check = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"] * (tool == "memcheck") or [
        "compute-sanitizer", "--tool", tool
    ]  # fmt: skip
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugins, "-m", "gpu and not traps"]
    paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*check, "--print-limit", "2000", *pytest, *(str(HERE / t) if t.startswith("test_") else t for t in tests)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    kinds: dict[str, int] = {}
    for line in done.stdout.splitlines():
        if FOUND.match(line):
            kind = re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)", "..", line.strip("= "))
            kinds[kind] = kinds.get(kind, 0) + 1
    summary = SUMMARY.search(done.stdout)
    clean = done.returncode == 0 and summary is not None and summary[1] == "0"
    said = [f"{shape}: {summary[0].strip('= ') if summary else 'no summary'}; pytest: {_last(done.stdout)}"]
    said += [f"    {count} of {kind[:200]}" for kind, count in sorted(kinds.items(), key=lambda k: -k[1])[:12]]
    return "\n".join([*said, f"    {time.perf_counter() - start:.0f} s"]), clean


def _last(text: str) -> str:
    """pytest's own summary."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return lines[-1] if lines else "nothing ran"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--every-lane", action="store_true")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes on the GPU at a time")
    given = parser.parse_args()
    plugins = ["-p", "every_lane"] if given.every_lane else []
    with ThreadPoolExecutor(given.jobs) as pool:
        found = [pool.submit(run, given.tool, shape, SHAPES[shape], plugins) for shape in given.only]
        clean = True
        for each in found:
            said, good = each.result()
            print(said, flush=True)
            clean &= good
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())

"""Where the time of a block on few rows goes: the clocks at which its CTAs begin and end each phase.

    python -m benchmarks.run.few_rows_phases  GPT-2's and BERT's block, G1 and G3, at 128 rows
    python -m benchmarks.run.few_rows_phases gpt2

Needs an H100 or H200. Kernels are compiled with TS_MARKS: a thread of each CTA writes the SM's clock at a dozen places
(``Mark`` of marks.cuh). Printed are microseconds from a CTA's start, the median and the last over all
CTAs, of the median launch of several; and what the kernel without marks takes in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.lib.block_models import BLOCKS, Repeated
from benchmarks.lib.few_rows_workloads import WORKLOADS
from benchmarks.lib.places import RESULTS
from benchmarks.run.few_rows import program as workload_program
from tilestream import cuda
from tilestream.apps.layers import random_operands
from tilestream.bench.environment import environment
from tilestream.cuda import driver
from tilestream.cuda.cache import compile_ahead, compiled
from tilestream.cuda.launch import CompiledPipeline
from tilestream.cuda.one_launch import Launch
from tilestream.graph.capture import capture as capture_graph
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.families import kernel_of
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run.timing import capture, interleaved

OUT = RESULTS / "few_rows_phases.json"
MARKS = (
    "started", "rows made", "first stage", "first sum", "middle stored", "middle back", "second sum", "ended",
    "rows there", "set up", "vectors there", "start ns", "end ns",
)  # fmt: skip
"""As ``Mark`` of marks.cuh has them; the last two are of the GPU's common time, not of the SM's clock."""
PLACES, LAUNCHES, ROWS = 16, 21, 128


BLOCK = (Split(8, 16), Split(8, 8, tile_rows=64, row_tiles=2))
CASES = {
    "gpt2": BLOCK,
    "bert-base": BLOCK,
    "G1": (Split(4, 8, Tail.REDUCE_ADD), Split(1, 8, Tail.NONE, 16, 8, middle=Middle.DSM)),
    "G3": (Split(4, 16, Tail.REDUCE_ADD), Split(4, 8, Tail.REDUCE_ADD, 32, 4)),
}
"""Of 128 rows: the best as one tile, and the best as several side by side."""


def program(name: str) -> Pipeline:
    """A workload of ``few_rows.py``, or the one region of a block of ``decoders.py``."""
    if name in WORKLOADS:
        return workload_program(WORKLOADS[name])
    module = Repeated(BLOCKS[name], 1).bfloat16().eval()
    with torch.no_grad():
        graph = capture_graph(module, (torch.randn(ROWS, BLOCKS[name].width).bfloat16(),)).graphs[0]
    (region,) = partition(graph).regions
    return region.program


def marked(pipeline: Pipeline) -> KernelSource:
    source = kernel_of(pipeline).source()
    return replace(source, text="#define TS_MARKS\n" + source.text)


def phases(pipeline: Pipeline, rows: int) -> dict[str, tuple[float, float]]:
    """Microseconds from a CTA's start to each mark: the median and the last of the CTAs, of the median launch."""
    source = marked(pipeline)
    device = torch.device("cuda", torch.cuda.current_device())
    launch = Launch(kernel_of(pipeline), source, compiled(source), device)
    kernel = CompiledPipeline(pipeline, [launch], device)
    operands = random_operands(pipeline, rows, "cuda", 0)
    found = []
    for _ in range(LAUNCHES):
        kernel(operands, rows)
        torch.cuda.synchronize()
        found.append(read_marks(launch))
    spans = [float(np.median(made[:, MARKS.index("ended")])) for made in found]
    marks = found[sorted(range(LAUNCHES), key=spans.__getitem__)[LAUNCHES // 2]]
    return {
        name: (float(np.median(marks[:, k])), float(marks[:, k].max()))
        for k, name in enumerate(MARKS[:-2])
        if marks[:, k].any()
    }


def read_marks(launch: Launch) -> np.ndarray:
    """``[CTAs, marks]``, microseconds from each CTA's start; 0 where a mark was not reached."""
    address, size = launch.function.variable("ts_marks")
    raw = np.frombuffer(driver.read(address, size), dtype=np.uint64).reshape(-1, PLACES)
    raw = raw[: launch.frame.ctas].astype(np.int64)
    ended, start_ns, end_ns = (MARKS.index(name) for name in ("ended", "start ns", "end ns"))
    clocks = raw[:, :start_ns] - raw[:, :1]
    us_a_clock = np.median((raw[:, end_ns] - raw[:, start_ns]) / clocks[:, ended]) / 1000
    return np.where(raw[:, :start_ns] > 0, clocks, 0) * us_a_clock


def launch_us(pipeline: Pipeline, rows: int) -> float:
    """From launch to launch in a CUDA graph, two sets of weights in turn."""
    kernel = cuda.build(pipeline)
    sets = [random_operands(pipeline, rows, "cuda", seed) for seed in range(2)]
    (result,) = pipeline.by_role(Role.OUTPUT)
    calls = [kernel.bind(each, rows, (result.name,)) for each in sets]
    y = torch.empty(rows, result.shape[-1], device="cuda", dtype=torch.bfloat16)

    def run() -> object:
        return [call((y,)) for call in calls]

    (samples,) = interleaved([capture(run, 600.0, 40)], 15)
    return statistics.median(samples) / len(calls)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    made = []
    programs = {name: program(name) for name in given.names or CASES}
    wanted = [share_tile(programs[name], split) for name in programs for split in CASES[name]]
    compile_ahead([marked(pipeline) for pipeline in wanted])
    cuda.start(wanted)
    for name in programs:
        for split in CASES[name]:
            pipeline = share_tile(programs[name], split)
            marks, us = phases(pipeline, ROWS), launch_us(pipeline, ROWS)
            made.append({"case": name, "rows": ROWS, "split": str(split), "us": us, "marks": marks})
            text = ", ".join(f"{what} {a:.2f} / {b:.2f}" for what, (a, b) in marks.items())
            print(f"{name}, {split}: {us:.2f} us a launch; {text}", flush=True)
    given.out.write_text(json.dumps({"environment": environment(), "rows": made}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

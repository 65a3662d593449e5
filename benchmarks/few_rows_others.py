"""What others fuse of FlashFuser's workloads at 128 rows: Inductor's ``b2b_gemm_pass``, CUTLASS's examples 13 and 45.

    pip download nvidia-cutlass --no-deps && unzip nvidia_cutlass-*.whl -d wheel
    python benchmarks/few_rows_others.py --wheel wheel --library libcutlass_examples.so     compiles, needs nvcc alone
    python benchmarks/few_rows_others.py --library libcutlass_examples.so                   times, needs an H100 or H200

Beside them eager, fused cuBLAS and one kernel of ours, under the protocol of ``few_rows.py``: all arms of a workload in
one process and in turn. Example 13 keeps all columns of the middle in a CTA's shared memory, which 512 are (G1, G3) and
the next, 1,536, are not. Example 45 has both products of a gated first layer in one kernel; cuBLAS the second layer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from few_rows import MOST_B2B_BYTES, RESULTS, WORKLOADS, Data, Row, Run, Workload, checked, library, ours, timed

from tilestream.bench.environment import environment
from tilestream.plan.passes.share_tile import Split
from tilestream.schedule.shared_tile import Tail

ROWS = 128
HERE = Path(__file__).parent
MIDDLE_13, RESULT_13 = 512, 256
"""Columns that a CTA of example 13 is compiled for."""
OURS = {"G1": Split(4, 8, Tail.REDUCE_ADD), "G3": Split(4, 16, Tail.REDUCE_ADD)}
"""The best kernel of ours, where it is another than 8 groups of 16."""
FOLDERS = ("include", "tools/util/include", "examples", "examples/13_two_tensor_op_fusion", "examples/45_dual_gemm")


def compile_library(wheel: Path, made: Path) -> None:
    """``cutlass_examples.cu`` to a shared library, with the headers of an unpacked wheel ``nvidia-cutlass``."""
    source = wheel / "cutlass_library" / "source"
    flags = ["-std=c++17", "-O3", "-gencode=arch=compute_90,code=sm_90", "--expt-relaxed-constexpr", "-w"]
    flags += ["-Xcompiler", "-fPIC", "-shared", *(f"-I{source / folder}" for folder in FOLDERS)]
    subprocess.run(["nvcc", *flags, "-o", str(made), str(HERE / "cutlass_examples.cu")], check=True)


def pointer(t: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def done(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} refused with code {code}")


def example_13(kernels: ctypes.CDLL, w: Workload, data: Data) -> Run:
    """Both products in one kernel."""
    y = torch.empty(ROWS, w.out, device="cuda", dtype=torch.bfloat16)
    zeros = torch.zeros(4 * w.hid, device="cuda", dtype=torch.bfloat16)  # the kernel adds a bias to the middle

    def run(n: int) -> torch.Tensor:
        up, down = data.sets[n]["up"], data.sets[n]["down"]
        args = [pointer(t) for t in (data.x, up, zeros, down, y)]
        done(kernels.example_13(ROWS, w.k, *args, stream()), "example 13")
        return y

    return run


def example_45(kernels: ctypes.CDLL, w: Workload, data: Data, tile: int) -> Run:
    """Both products of the first layer in one kernel, the second layer by cuBLAS."""
    h = torch.empty(ROWS, w.hid, device="cuda", dtype=torch.bfloat16)

    def run(n: int) -> torch.Tensor:
        s = data.sets[n]
        args = [pointer(t) for t in (data.x, s["gate"], s["up"], h)]
        done(kernels.example_45(tile, ROWS, w.hid, w.k, *args, stream()), "example 45")
        return F.linear(h, s["down"])

    return run


def workload(name: str, kernels: ctypes.CDLL) -> list[Row]:
    """Every arm of a workload that is right, timed."""
    w = WORKLOADS[name]
    data = Data.random(w, ROWS)
    exact = [data.exact(w, n) for n in range(2)]
    arms = library(w, data, compiled=not w.gated and w.weight_bytes < MOST_B2B_BYTES, planner=False, tuned=False)
    if (w.hid, w.out, w.gated) == (MIDDLE_13, RESULT_13, False):
        arms["CUTLASS 13"] = example_13(kernels, w, data)
    if w.gated:
        for tile in (64, 128):
            arms[f"CUTLASS 45, {tile} rows, and cuBLAS"] = example_45(kernels, w, data, tile)
    split = OURS.get(name, Split(8, 16, Tail.REDUCE_ADD))
    arms[f"shared {split}"] = ours(w, data, split)
    errors = {arm: checked(run, data, exact) for arm, run in arms.items()}
    for arm, (error, _) in errors.items():
        if error >= 0.02:
            print(f"  WRONG {name} {arm}: error {error:.2e}", flush=True)
    times = timed({arm: run for arm, run in arms.items() if errors[arm][0] < 0.02}, len(data.sets))
    made = [Row(name, ROWS, arm, *us, *errors[arm]) for arm, us in times.items()]
    for r in sorted(made, key=lambda r: r.warm_us):
        print(f"{name:4} {r.warm_us:8.2f} {r.cold_us:8.2f}  {r.error:.1e}  {r.arm}", flush=True)
    return made


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--library", type=Path, required=True, help="compiled from cutlass_examples.cu")
    parser.add_argument("--wheel", type=Path, help="an unpacked nvidia-cutlass: compile the library, and time nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "few_rows_others.json")
    given = parser.parse_args(words)
    if given.wheel:
        compile_library(given.wheel, given.library)
        return 0
    torch.set_grad_enabled(False)
    kernels = ctypes.CDLL(str(given.library.resolve()))
    rows: list[Row] = []
    for name in given.names or WORKLOADS:
        rows += workload(name, kernels)
        text = json.dumps({"environment": environment(), "rows": [asdict(r) for r in rows]}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""CUTLASS's examples 13 and 45 as arms of ``few_rows.py``: two products in one kernel, at 128 rows.

    pip download nvidia-cutlass --no-deps && unzip nvidia_cutlass-*.whl -d wheel
    python -m benchmarks.lib.cutlass_examples --wheel wheel libcutlass_examples.so  compiles, needs nvcc and no GPU

Example 13 keeps all columns of the middle in a CTA's shared memory, which 512 are (G1, G3) and the next, 1,536, are
not. Example 45 has both products of a gated first layer in one kernel; cuBLAS the second layer.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

MIDDLE_13, RESULT_13 = 512, 256
"""Columns that a CTA of example 13 is compiled for."""
TILES_45 = (64, 128)
"""Rows of a tile that example 45 is compiled for."""
FOLDERS = ("include", "tools/util/include", "examples", "examples/13_two_tensor_op_fusion", "examples/45_dual_gemm")

Run = Callable[[int], torch.Tensor]
Weights = Sequence[Mapping[str, torch.Tensor]]


def compile_library(wheel: Path, made: Path) -> None:
    """``cutlass_examples.cu`` to a shared library, with the headers of an unpacked wheel ``nvidia-cutlass``."""
    source = wheel / "cutlass_library" / "source"
    flags = ["-std=c++17", "-O3", "-gencode=arch=compute_90,code=sm_90", "--expt-relaxed-constexpr", "-w"]
    flags += ["-Xcompiler", "-fPIC", "-shared", *(f"-I{source / folder}" for folder in FOLDERS)]
    subprocess.run(["nvcc", *flags, "-o", str(made), str(Path(__file__).with_suffix(".cu"))], check=True)


def arms(library: Path, x: torch.Tensor, sets: Weights) -> dict[str, Run]:
    """The examples that take a block of these sizes, as functions of which set of weights: ``up``, ``down``, ``gate``.

    Args:
        library: what ``compile_library`` made.
        x: ``[rows, k]``, bf16, on the GPU.
    """
    kernels = ctypes.CDLL(str(library.resolve()))
    (hid, _), out = sets[0]["up"].shape, sets[0]["down"].shape[0]
    if "gate" in sets[0]:
        return {f"CUTLASS 45, {tile} rows, and cuBLAS": _example_45(kernels, x, sets, tile) for tile in TILES_45}
    return {"CUTLASS 13": _example_13(kernels, x, sets)} if (hid, out) == (MIDDLE_13, RESULT_13) else {}


def _example_13(kernels: ctypes.CDLL, x: torch.Tensor, sets: Weights) -> Run:
    """Both products in one kernel."""
    (rows, k), hid, out = x.shape, sets[0]["up"].shape[0], sets[0]["down"].shape[0]
    y = torch.empty(rows, out, device="cuda", dtype=torch.bfloat16)
    zeros = torch.zeros(4 * hid, device="cuda", dtype=torch.bfloat16)  # the kernel adds a bias to the middle

    def run(n: int) -> torch.Tensor:
        args = [_pointer(t) for t in (x, sets[n]["up"], zeros, sets[n]["down"], y)]
        _done(kernels.example_13(rows, k, *args, _stream()), "example 13")
        return y

    return run


def _example_45(kernels: ctypes.CDLL, x: torch.Tensor, sets: Weights, tile: int) -> Run:
    """Both products of the first layer in one kernel, the second layer by cuBLAS."""
    (rows, k), hid = x.shape, sets[0]["up"].shape[0]
    h = torch.empty(rows, hid, device="cuda", dtype=torch.bfloat16)

    def run(n: int) -> torch.Tensor:
        args = [_pointer(t) for t in (x, sets[n]["gate"], sets[n]["up"], h)]
        _done(kernels.example_45(tile, rows, hid, k, *args, _stream()), "example 45")
        return F.linear(h, sets[n]["down"])

    return run


def _pointer(t: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _done(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} refused with code {code}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="what is made")
    parser.add_argument("--wheel", type=Path, required=True, help="an unpacked nvidia-cutlass")
    given = parser.parse_args(words)
    compile_library(given.wheel, given.library)
    return 0


if __name__ == "__main__":
    sys.exit(main())

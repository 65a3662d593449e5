"""One warm call of one arm between profiler marks; what ``dram.measure`` runs under Nsight Compute."""

from __future__ import annotations

import argparse

import torch

from tilestream.apps.load import load
from tilestream.bench import arms
from tilestream.options import Options


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arm", choices=arms.ARMS)
    parser.add_argument("target")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--strategy", default="auto")
    given = parser.parse_args()
    workload = load(given.target, given.rows, given.dtype, "cuda")
    # The plan was measured by the benchmark itself; under the profiler a time means nothing.
    options = Options(strategy=given.strategy)
    arm = arms.make(given.arm, workload.module, workload.inputs, options)
    arm.run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    arm.run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()

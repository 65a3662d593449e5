"""One warm call of one arm between profiler marks; what ``dram.measure`` runs under Nsight Compute."""

from __future__ import annotations

import argparse

import torch

from tilestream.apps.load import load
from tilestream.bench import arms
from tilestream.options import Options


def parser() -> argparse.ArgumentParser:
    """Arguments that make the same model again in another process."""
    made = argparse.ArgumentParser()
    made.add_argument("model")
    made.add_argument("--rows", type=int)
    made.add_argument("--dtype")
    made.add_argument("--strategy", default="auto")
    made.add_argument("--target", default="auto")
    made.add_argument("--arm", choices=(*arms.ARMS, "capture"), default="tilestream")
    return made


def main() -> None:
    given = parser().parse_args()
    workload = load(given.model, given.rows, given.dtype, "cuda")
    # The plan was measured by the benchmark and is in the cache; under the profiler a time means nothing.
    options = Options(strategy=given.strategy, target=given.target)
    arm = arms.make(given.arm, workload.module, workload.inputs, options, workload.keywords)
    arm.run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    arm.run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()

"""Serve a recommender at several batch sizes: one compiled model, CUDA graphs, latency against eager and Inductor.

    python examples/serve_dlrm.py                     batches of 256 to 32,768; wants a Hopper GPU. On a CPU 64 alone
    python examples/serve_dlrm.py --batches 16 64 --tables 1000

Without a GPU all three run on the CPU, tilestream by Inductor, and the table says what was timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tilestream.apps.models import find
from tilestream.cli.progress import Progress

REPEATS = 30


def latency_us(call: Callable[[], object], gpu: bool) -> float:
    """Median microseconds of one call, from asking to having: what a client waits for."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def arms(model: nn.Module) -> dict[str, Callable[..., object]]:
    """The model by each compiler; ``reduce-overhead`` replays CUDA graphs, a graph for each batch size."""
    return {
        "eager": model,
        "inductor": torch.compile(model, dynamic=False, mode="reduce-overhead"),
        "tilestream": torch.compile(model, dynamic=False, backend="tilestream", mode="reduce-overhead"),
    }


def serve(batches: list[int], tables: int) -> dict[int, dict[str, float]]:
    """Microseconds by batch size and arm; every arm's answers are held against eager's."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    found: dict[int, dict[str, float]] = {}
    with Progress() as say:
        for batch in batches:
            say(f"a model with tables of up to {tables:,} rows")
            torch.compiler.reset()
            model, inputs = find("dlrm").make(device=device, batch=batch, max_rows=tables)
            found[batch] = {}
            with torch.inference_mode():
                want = model(*inputs).float()
                for name, arm in arms(model).items():
                    say(f"batch {batch:,}, {name}: the first call")
                    got = arm(*inputs)
                    assert isinstance(got, torch.Tensor)
                    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)
                    found[batch][name] = latency_us(lambda arm=arm, inputs=inputs: arm(*inputs), gpu)
    return found


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    batches, tables = ([256, 2048, 8192, 32768], 100_000) if torch.cuda.is_available() else ([64], 1000)
    wanted.add_argument("--batches", type=int, nargs="+", default=batches)
    wanted.add_argument("--tables", type=int, default=tables, help="rows of the largest embedding table")
    given = wanted.parse_args()
    found = serve(given.batches, given.tables)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    table = Table(title=f"DLRM on {where}: microseconds a request", title_justify="left")
    for column in ("batch", *next(iter(found.values()))):
        table.add_column(column, justify="right")
    for batch, times in found.items():
        table.add_row(f"{batch:,}", *(f"{us:,.0f}" for us in times.values()))
    Console().print(table)


if __name__ == "__main__":
    main()

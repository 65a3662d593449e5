"""Time bags, segments and experts: eager, Inductor and tilestream.

    python -m benchmarks.run.given_bounds                   all of them
    python -m benchmarks.run.given_bounds bag experts       cases whose names begin so
    python -m benchmarks.run.given_bounds --kernels FILE    also the kernels of each arm, by torch's profiler
    python -m benchmarks.run.given_bounds --compile         first calls alone, which fill the caches
    python -m benchmarks.run.given_bounds --cpu             tiny, on our reference machine: values alone

Bags are 65,536 of about 20 rows of a table of 1,000,000 by 64, segments the same rows side by side, experts those of
``benchmarks/lib/masked_models.py``. Each case is captured as CUDA graphs, rounds interleaved, medians; training steps
are of the results' mean square. Errors are relative, against float64. Needs an H100 or H200. Results go to
``benchmarks/results/given_bounds.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lib import masked_models
from benchmarks.lib.places import RESULTS
from tilestream.run import oracle, timing
from tilestream.run.backend import tilestream

ROWS, FEATURES, BAGS, EACH = 1_000_000, 64, 65_536, 20
BYTES_PER_S = 4.3e12
ROUNDS = 15


class Segments(nn.Module):
    """Rows that a function makes, reduced."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return torch.segment_reduce(nn.functional.silu(rows), self.how, offsets=offsets)


@dataclass
class Case:
    """A module and its inputs; ``exact`` gives the results in float64 where the module in float64 does not.

    Attributes:
        bytes: what must be read and written.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    bytes: float
    training: bool = False
    exact: Callable[[], list[Tensor]] | None = None

    def step(self, function: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Results, or the gradients of all parameters."""
        if not self.training:
            with torch.no_grad():
                return [function(*inputs)]
        module.zero_grad(set_to_none=True)
        y = function(*inputs)
        (y if y.dtype == torch.float64 else y.float()).square().mean().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]


def cases(cpu: bool) -> Iterator[Case]:
    device, (rows, count) = "cpu" if cpu else "cuda", (300, 40) if cpu else (ROWS, BAGS)
    torch.manual_seed(0)
    lengths = torch.randint(0, 2 * EACH + 1, (count,), device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    edges = int(offsets[-1])
    indices = torch.randint(rows, (edges,), device=device)
    for dtype in (torch.bfloat16, torch.float32):
        size = dtype.itemsize
        needed = edges * (FEATURES * size + 8) + count * FEATURES * size
        for mode in ("sum", "mean", "max"):
            bag = nn.EmbeddingBag(rows, FEATURES, mode=mode, include_last_offset=True, device=device, dtype=dtype)
            name = f"bag/{mode}/{str(dtype).removeprefix('torch.')}"
            yield Case(name, bag, (indices, offsets), needed)
            if mode == "sum":
                more = edges * (FEATURES * size + 8) + rows * FEATURES * size
                yield Case(f"{name}/training", bag, (indices, offsets), needed + more, training=True)
    x = torch.randn(edges, FEATURES, device=device).bfloat16()
    for how in ("sum", "max"):
        yield Case(f"segments/{how}/bfloat16", Segments(how), (x, offsets), 2 * (edges + count) * FEATURES)
    few = torch.tensor([0, edges // 3, edges // 2, edges - 9, edges] if cpu else [*range(0, edges, 4096), edges])
    yield Case("segments/long/bfloat16", Segments("sum"), (x, few.to(device)), 2 * edges * FEATURES)
    yield from experts(device, cpu)


def experts(device: str, cpu: bool) -> Iterator[Case]:
    module, inputs = masked_models.experts(device, cpu)
    with torch.no_grad():
        chosen, _ = module.chosen(*inputs)
        loop = copy.deepcopy(masked_models.Loop(module)).double()
    needed = 2.0 * (module.up.numel() + module.down.numel() + 2 * inputs[0].numel())
    yield Case("experts", module, inputs, needed, exact=lambda: [loop(inputs[0].double(), chosen)])
    yield Case("experts/training", module, inputs, 3 * needed, training=True)


def arms(case: Case, cpu: bool) -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {"eager": case.module}
    ours: dict[str, Any] = {"target": "reference"} if cpu else {}
    for name in () if cpu else ("inductor",):
        torch._dynamo.reset()
        made[name] = torch.compile(case.module, backend=name)
        case.step(made[name], case.module, case.inputs)
    torch._dynamo.reset()
    made["tilestream"] = torch.compile(case.module, backend=tilestream, options=ours)
    return made


def result(case: Case, cpu: bool, kernels: list[str]) -> dict[str, Any]:
    functions = arms(case, cpu)
    got = {name: [x.clone() for x in case.step(f, case.module, case.inputs)] for name, f in functions.items()}
    found: dict[str, Any] = {"floor_us": case.bytes / BYTES_PER_S * 1e6}
    if case.exact is not None or not case.name.startswith("experts"):
        exact = case.exact() if case.exact is not None else _in_doubles(case)
        found["errors"] = {name: max(map(oracle.error, x, exact)) for name, x in got.items()}
    again = case.step(functions["tilestream"], case.module, case.inputs)
    found["same_bits"] = all(map(torch.equal, got["tilestream"], again))
    if cpu:
        return found
    captured = [timing.capture(lambda f=f: case.step(f, case.module, case.inputs)) for f in functions.values()]
    times = timing.interleaved(captured, ROUNDS)
    found["us"] = {name: statistics.median(t) for name, t in zip(functions, times, strict=True)}
    found["gain"] = min(us for name, us in found["us"].items() if name != "tilestream") / found["us"]["tilestream"]
    if kernels:
        for name, f in functions.items():
            _profile(f"{case.name}, {name}", lambda f=f: case.step(f, case.module, case.inputs), kernels[0])
    return found


def _in_doubles(case: Case) -> list[Tensor]:
    wide = copy.deepcopy(case.module).double()
    return case.step(wide, wide, tuple(x.double() if x.is_floating_point() else x for x in case.inputs))


def _profile(title: str, call: Callable[[], object], to: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    with Path(to).open("a") as file:
        rows = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
        file.write(f"\n{title}\n")
        file.writelines(f"{e.device_time_total / 5:8.1f} us  {e.count / 5:4.1f}  {e.key[:130]}\n" for e in rows[:24])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--kernels", nargs=1, default=[])
    parser.add_argument("--to", type=Path, default=RESULTS / "given_bounds.json")
    given = parser.parse_args()
    results = json.loads(given.to.read_text())["cases"] if given.to.exists() else {}
    for case in cases(given.cpu):
        if given.names and not any(case.name.startswith(name) for name in given.names):
            continue
        if given.compile:
            for function in arms(case, given.cpu).values():
                case.step(function, case.module, case.inputs)
            continue
        try:
            results[case.name] = result(case, given.cpu, given.kernels)
        except Exception as failure:  # the others are worth their time
            results[case.name] = {"failed": f"{type(failure).__name__}: {failure}"[:500]}
        print(case.name, json.dumps(results[case.name]), flush=True)
        if not given.cpu:
            where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            given.to.write_text(json.dumps({**where, "cases": results}, indent=1))


if __name__ == "__main__":
    main()

"""Time two releases of the compiler beside each other: the same models, each release in processes of its own, in turn.

    python -m benchmarks.run.releases --before PATH        PATH: a checkout of the release before
    python -m benchmarks.run.releases --before PATH nerf decode   cases whose names begin so
    python -m benchmarks.run.releases --cpu --before . siren      on our reference machine: no times to believe

bf16, random data, CUDA graphs; the rounds of a case go over both releases in turn. Each release brings its own models.
``first_call_s`` is measured while the other processes compile too, with empty caches. Needs an H100 or H200. Results go
to ``benchmarks/results/releases.json``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS, ROOT

ROUNDS, SETTLE_S = 20, 1.0
SLOWER = 1.02
"""A case is slower by more than what two runs of one release differ by."""
GROUPS = ("small", "whole", "rows", "training")
SMALL = (
    *("nerf", "chain", "meshgraphnets", "graphcast", "autoencoder", "siren", "sdf", "policy_value", "gated_ffn"),
    *("mixer", "tabular_resnet", "dlrm_bottom", "two_tower", "classifier"),
)
WHOLE = ("nerf_16384", "dlrm_2048", "dlrm_32768", "mgn", "graphcast_small", "llama_layer")
DECODED = (("llama-3.2-1b", (1, 16)), ("qwen3-0.6b", (1, 16, 128)), ("gpt2", (1, 16)), ("bert-base", (1,)))
CONVOLUTIONS = (("C1", 8), ("C3", 8), ("C5", 8), ("C7", 8), ("tail56", 8))
TRAINED = ("nerf_65536", "mgn", "dlrm_2048", "llama_layer")
Made = tuple[Any, tuple[Any, ...], bool]
"""A module, its inputs, and whether a training step of it is timed."""


def cases(group: str, cpu: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    """The cases of a group by name, and what makes each."""
    from benchmarks.lib.real_models import MODELS, Case, module
    from benchmarks.run import conv_chains
    from benchmarks.run.whole_models import CASES, model_of
    from tilestream.apps import APPS

    device = "cpu" if cpu else "cuda"
    few: dict[str, Any] = {"rows": 256} if cpu else {}
    if group == "small":
        for name in SMALL:
            yield name, lambda name=name: (*APPS[name].make(device=device, **few), False)
    if group == "whole":
        for name in WHOLE:
            yield f"whole {name}", lambda name=name: (*model_of(*CASES[name], False, device), False)
    if group == "training":
        for name in TRAINED:
            yield f"train {name}", lambda name=name: (*model_of(*CASES[name], True, device), True)
    if group == "rows":
        for name, batches in DECODED:
            for batch in batches:

                def real(name: str = name, batch: int = batch) -> Made:
                    case = Case(batch, 128 if name == "bert-base" else 1)
                    return module(MODELS[name], 2, device=device), MODELS[name].inputs(case, device=device), False

                yield f"decode {name} {batch}", real
        for name, images in CONVOLUTIONS:

            def convolution(name: str = name, images: int = images) -> Made:
                made, inputs = conv_chains.module(name, images, device)
                return made, tuple(inputs), False

            yield f"convolution {name} {images}", convolution


def worker(group: str, wanted: Sequence[str], cpu: bool) -> None:
    """Compile the cases of a group, say how each went, then replay what is asked for by name."""
    import torch

    from benchmarks.run.whole_models import inference, training
    from tilestream.run import prepare, timing
    from tilestream.run.backend import tilestream

    captured: dict[str, Any] = {}
    for name, make in cases(group, cpu):
        if wanted and not any(name.startswith(w) for w in wanted):
            continue
        said: dict[str, Any] = {"case": name}
        try:
            torch.manual_seed(0)
            torch.compiler.reset()
            module, inputs, train = make()
            options: dict[str, Any] = {"target": "reference"} if cpu else {}
            function = torch.compile(module, dynamic=False, backend=tilestream, options=options)
            call = functools.partial(training if train else inference, function, module, inputs)
            compiled, start = len(prepare.analyses()), time.perf_counter()
            call()
            said["first_call_s"] = time.perf_counter() - start
            said["chosen"] = chosen(compiled)
            captured[name] = call if cpu else timing.capture(call)
        except Exception as failure:
            said["failed"] = f"{type(failure).__name__}: {failure}"[:300]
        print(json.dumps(said), flush=True)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        one = captured[line.strip()]
        if cpu:
            start = time.perf_counter()
            one()
            us = 1e6 * (time.perf_counter() - start)
        else:
            us = timing.replay_us(one.graph) / one.calls
        print(json.dumps({"us": us}), flush=True)


def chosen(before: int) -> list[str]:
    """What runs in regions compiled after the first ``before`` of the process, with its measured microseconds."""
    from tilestream.run import prepare

    plans = [a.plan for a in prepare.analyses()[before:]]
    return [f"{p.chosen.name}: {p.chosen.measured_us}" for p in plans if p is not None]


@dataclass
class Process:
    """A worker, and what it has said of its cases."""

    release: str
    group: str
    running: subprocess.Popen[str]
    said: dict[str, dict[str, Any]]

    def line(self) -> dict[str, Any]:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise EOFError(f"the process of {self.release}, {self.group}, has ended; its own words are on stderr")

    def us(self, name: str) -> float:
        assert self.running.stdin is not None
        print(name, file=self.running.stdin, flush=True)
        return float(self.line()["us"])


def started(release: str, root: Path, group: str, given: argparse.Namespace, caches: str) -> Process:
    own = Path(caches) / f"{release}-{group}"
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "home"}
    environ = {**os.environ, **{name: str(own / folder) for name, folder in folders.items()}}
    environ |= {"PYTHONPATH": os.pathsep.join(str(root.resolve() / part) for part in ("src", "."))}
    command = [sys.executable, __file__, "--of", group, *given.cases, *(["--cpu"] if given.cpu else [])]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return Process(release, group, subprocess.Popen(command, env=environ, cwd=root, **pipes), {})


def compared(before: Process, now: Process, name: str, rounds: int) -> dict[str, Any]:
    """Median microseconds of a case in both releases."""
    samples: Mapping[str, list[float]] = {"before": [], "now": []}
    settled_s = time.perf_counter() + SETTLE_S
    order = [before, now]
    while len(samples["now"]) < rounds:
        counts = time.perf_counter() >= settled_s
        for process in order:
            us = process.us(name)
            if counts:
                samples[process.release].append(us)
        order.reverse()
    row: dict[str, Any] = {f"{release}_us": statistics.median(found) for release, found in samples.items()}
    said = {f"{p.release}_{what}": p.said[name][what] for p in (before, now) for what in ("first_call_s", "chosen")}
    return {"case": name, **row, "ratio": row["now_us"] / row["before_us"], **said}


def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as caches:
        pairs = [
            (started("before", given.before, group, given, caches), started("now", ROOT, group, given, caches))
            for group in GROUPS
        ]
        for process in (p for pair in pairs for p in pair):
            while "ready" not in (said := process.line()):
                process.said[said["case"]] = said
        rows: list[dict[str, Any]] = []
        for before, now in pairs:
            for name in now.said:
                failed = {p.release: p.said[name]["failed"] for p in (before, now) if "failed" in p.said.get(name, {})}
                rows.append({"case": name, "failed": failed} if failed else compared(before, now, name, given.rounds))
                print(json.dumps(rows[-1]), flush=True)
            for process in (before, now):
                process.running.kill()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="beginnings of names; all cases without")
    parser.add_argument("--before", type=Path, default=ROOT, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--of", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "releases.json")
    given = parser.parse_args()
    if given.of:
        worker(given.of, given.cases, given.cpu)
        return 0
    from tilestream.bench.environment import environment

    rows = measured(given)
    made = {"schema": 1, "environment": environment(), "rows": rows}
    given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    timed = [row for row in rows if "ratio" in row]
    slower = [row["case"] for row in timed if row["ratio"] > SLOWER]
    mean = statistics.geometric_mean([row["ratio"] for row in timed]) if timed else float("nan")
    print(f"{len(timed)} cases, geometric mean {mean:.3f}; slower by over 2 %: {', '.join(slower) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

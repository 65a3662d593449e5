"""Time graph networks, sparse attention and experts: eager, Inductor, max-autotune, ``torch.sparse`` and tilestream.

    python -m benchmarks.run.gnn                        all of them
    python -m benchmarks.run.gnn gin gat/power experts  cases whose names begin so
    python -m benchmarks.run.gnn --seconds 300          what is compiled by then is timed
    python -m benchmarks.run.gnn --kernels FOLDER       also the kernels of cases that gain little, a file a case
    python -m benchmarks.run.gnn --cpu gin              tiny, on our reference machine: values alone

The models are those of ``benchmarks/lib/gnn_models.py`` and ``masked_models.py``; inference, and training steps without
an optimizer (the mean square of the results, backward). Each is compiled in a process of its own, all at once, then
timed while the others wait: all arms in one process, as CUDA graphs (in a plain loop where PyG synchronises), rounds
interleaved, medians. Errors are relative to the model in float64, of all results or gradients as one vector;
``error_ratio``: ours over eager's in the worst one. ``floor_us``: FLOPs over 790 TFLOP/s, or bytes over 4.3 TB/s, rows
of nodes read once a layer. ``chosen``: what our compiler chose, by which times. Needs an H100 or H200 and
``torch_geometric``. Results go to ``benchmarks/results/gnn.json``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.lib import flops, gnn_models, masked_models
from benchmarks.lib.alone import alone_when_timed
from benchmarks.lib.choices import choices
from benchmarks.lib.places import RESULTS, module_command
from tilestream.run import oracle, timing
from tilestream.run.backend import tilestream

FLOPS_PER_S, BYTES_PER_S = 790e12, 4.3e12
LOOP_CALLS, LOOP_ROUNDS = 10, 7
AUTOTUNE_S, AUTOTUNE_CALLS = 45.0, 8.0
"""What max-autotune must have left to begin: so many seconds, and so many of Inductor's first calls (2 to 7.5 of them
is what it took); a process in the middle of it when the time is up is lost with all its cases."""
SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
MISSED, LONGEST = 1.5, 14
"""Of cases that gain less over the best of the others kernels are told, so many of a call."""


@dataclass
class Case:
    """A function of a module, its inputs, and what is timed beside it.

    Attributes:
        plain: timed in a plain loop.
        options: of our arm.
        others: further arms: a module and its inputs each.
        exact: gives the results in float64, where the module in float64 does not.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    training: bool = False
    plain: bool = False
    eager: nn.Module | None = None
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[str, tuple[nn.Module, tuple[Any, ...]]] = field(default_factory=dict)
    exact: Callable[[], list[Tensor]] | None = None
    flops: float | None = None

    def step(self, function: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
        """Results, or the gradients of all parameters."""
        if not self.training:
            with torch.no_grad():
                return [x for x in pytree.tree_leaves(function(*inputs)) if x.is_floating_point()]
        module.zero_grad(set_to_none=True)
        y = function(*inputs)
        wide = y if y.dtype == torch.float64 else y.float()
        wide.square().mean().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]


def groups() -> list[str]:
    """What has a process of its own: a model with all its graphs, or a case without a graph. The fresh ones first."""
    models = sorted(gnn_models.MODELS.values(), key=lambda m: not m.fresh)
    return [*(m.name for m in models), *masked_models.ATTENTION, "experts"]


def cases(group: str, cpu: bool) -> Iterator[Case]:
    """The cases of a group.

    Another graph of the same sizes is another case for our compiler, which chooses by what it times, and the same code
    for Inductor: the options of ours, all as they are anyway, are told apart for each.
    """
    device = "cpu" if cpu else "cuda"
    if group in masked_models.ATTENTION:
        module, inputs = masked_models.ATTENTION[group].problem(device, cpu)
        dense = masked_models.Dense(module.dense)
        kept = module.dense.float().mean().item()
        flops = 4.0 * kept * inputs[0].numel() * inputs[0].shape[-2]
        wide = [x.double() for x in inputs]
        yield Case(group, module, inputs, eager=dense, exact=lambda: [dense(*wide)], flops=flops)
        return
    if group == "experts":
        experts, inputs = masked_models.experts(device, cpu)
        with torch.no_grad():
            chosen, _ = experts.chosen(*inputs)
            loop = copy.deepcopy(masked_models.Loop(experts)).double()
        flops = 4.0 * chosen.numel() * experts.up[0].numel()
        yield Case(group, experts, inputs, exact=lambda: [loop(inputs[0].double(), chosen)], flops=flops)
        yield Case(f"{group}/training", experts, inputs, training=True, flops=3 * flops)
        return
    model = gnn_models.MODELS[group]
    module, _ = model.problem(model.kinds[0], device, cpu)
    for kind, options in zip(model.kinds, ({}, {"early_launch": True}), strict=False):
        inputs, name = model.problem(kind, device, cpu)[1], f"{group}/{kind}"
        case = Case(name, module, inputs, plain=model.plain, options=options)
        if model.csr:
            adjacency = gnn_models.adjacency(inputs[1], inputs[0].shape[0], model.dtype)
            case.others["csr"] = module, (inputs[0], adjacency)
        yield case
        yield Case(f"{name}/training", module, inputs, training=True, plain=model.plain, options=options)
        if group in ("gin", "sage"):
            held, given = gnn_models.kept(model, kind, device, cpu)
            yield Case(f"{name}/kept", held, given, options={"constant_weights": True, **options})


def compiled(arm: str, module: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    how: dict[str, Any] = {
        "inductor": {},
        "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
        "tilestream": {"backend": tilestream, "options": options},
    }[arm]
    return torch.compile(module, dynamic=False, **how)


@dataclass
class Made:
    """A case whose arms are compiled."""

    case: Case
    arms: dict[str, Callable[[], list[Tensor]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)

    def add(self, arm: str, cpu: bool) -> None:
        """Compile an arm and call it once."""
        case, module, inputs = self.case, self.case.module, self.case.inputs
        try:
            if arm in case.others:
                module, inputs = case.others[arm]
                function: Callable[..., Any] = module
            elif arm == "eager":
                module = case.eager or module
                function = module
            else:
                options = {**case.options, **({"target": "reference"} if cpu else {})}
                function = compiled(arm, module, options if arm == "tilestream" else {})
            call = functools.partial(case.step, function, module, inputs)
            start = time.perf_counter()
            with choices(self.chosen):
                call()
                _settled()
            self.first_s[arm] = time.perf_counter() - start
            self.arms[arm] = call
        except Exception as failure:
            self.failed[arm] = f"{type(failure).__name__}: {failure}"[:400]
        case.module.zero_grad(set_to_none=True)
        if not cpu:
            torch.cuda.empty_cache()

    def measured(self, cpu: bool) -> dict[str, Any]:
        """Errors and times."""
        case = self.case
        row: dict[str, Any] = {"case": case.name, "plain": case.plain, "failed": self.failed, "first_s": self.first_s}
        row |= {"chosen": self.chosen, "errors": self._errors(row), **self._floor(), "us": {}}
        for arm in [a for a in self.arms if a not in row["errors"]]:
            del self.arms[arm]
        if cpu or case.plain:
            row["us"] = in_loop(self.arms, 1 if cpu else LOOP_CALLS, cpu)
        else:
            row["us"] = self._as_graphs()
        ours, others = row["us"].get("tilestream"), [v for a, v in row["us"].items() if a != "tilestream"]
        if ours and others:
            row["speedup"] = min(others) / ours
        case.module.zero_grad(set_to_none=True)
        return row

    def _floor(self) -> dict[str, float]:
        """Nothing where it cannot be counted: the times are worth a row without it."""
        try:
            return {"floor_us": floor_us(self.case)}
        except Exception as failure:
            self.failed["floor"] = f"{type(failure).__name__}: {failure}"[:400]
            return {}

    def _as_graphs(self) -> dict[str, float]:
        captured: dict[str, Any] = {}
        for arm, call in self.arms.items():
            try:
                captured[arm] = timing.capture(call)
            except Exception as failure:
                self.failed[arm] = f"not as a CUDA graph: {type(failure).__name__}: {failure}"[:400]
                torch.cuda.synchronize()
        samples = timing.interleaved(list(captured.values()), timing.ROUNDS)
        return {arm: statistics.median(s) for arm, s in zip(captured, samples, strict=True)}

    def _errors(self, row: dict[str, Any]) -> dict[str, float]:
        """Of each arm; ``row`` is told by how much our error is the larger one in the worst of all tensors."""
        exact = self._exact()
        every: dict[str, list[float]] = {}
        whole: dict[str, float] = {}
        for arm, call in self.arms.items():
            try:
                found = call()
                every[arm] = [oracle.error(a, b) for a, b in zip(found, exact, strict=True)]
                whole[arm] = oracle.error(_flat(found), _flat(exact))
            except Exception as failure:
                self.failed[arm] = f"{type(failure).__name__}: {failure}"[:400]
        if "eager" in every and "tilestream" in every:
            pairs = zip(every["tilestream"], every["eager"], strict=True)
            row["error_ratio"] = max(ours / max(theirs, 1e-9) for ours, theirs in pairs)
        return whole

    def _exact(self) -> list[Tensor]:
        case = self.case
        if case.exact is not None:
            with torch.no_grad():
                return case.exact()
        module = copy.deepcopy(case.module).double()
        inputs = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case.inputs)
        with gnn_models.default(torch.float64):
            if isinstance(case.module, masked_models.Experts):  # grouped products have no float64
                (chosen, _), wide = case.module.chosen(*case.inputs), copy.deepcopy(case.module).double()
                loop = masked_models.Loop(wide)
                return case.step(lambda x: loop(x, chosen), wide, inputs)
            return case.step(module, module, inputs)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten().double() for x in tensors])


def floor_us(case: Case) -> float:
    """Microseconds of the FLOPs or of the bytes, whichever are more; a training step moves three times the bytes."""
    moved = [0.0]

    def read(_: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        found = [x for x in pytree.tree_leaves((given, result)) if isinstance(x, Tensor) and x.is_floating_point()]
        moved[0] += sum(x.numel() * x.element_size() for x in found)

    layers = getattr(getattr(case.module, "net", case.module), "layers", None)
    hooks = [layer.register_forward_hook(read) for layer in layers or ()]
    try:
        run = functools.partial(case.step, case.module, case.module, case.inputs)
        counted = flops.counted(run) if case.flops is None else case.flops
    finally:
        for hook in hooks:
            hook.remove()
    own = (*case.inputs, *case.module.buffers())
    lists = [x for x in own if isinstance(x, Tensor) and (not layers or not x.is_floating_point())]
    moved[0] += sum(x.numel() * x.element_size() for x in (*lists, *case.module.parameters()))
    return 1e6 * max(counted / FLOPS_PER_S, moved[0] * (3 if case.training else 1) / BYTES_PER_S)


def in_loop(arms: Mapping[str, Callable[[], object]], calls: int, cpu: bool) -> dict[str, float]:
    """Microseconds of a call in a plain loop, the arms in turn, medians."""
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(1 if cpu else LOOP_ROUNDS):
        for arm, call in arms.items():
            _settled()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            _settled()
            found[arm].append(1e6 * (time.perf_counter() - start) / calls)
    return {arm: statistics.median(samples) for arm, samples in found.items()}


def _settled() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def worker(group: str, given: argparse.Namespace, made_of: Callable[[str, bool], Iterator[Case]]) -> None:
    """Compile the cases of a group until the time is up, then time what is asked for by name.

    Args:
        made_of: as ``cases``.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    torch._dynamo.config.capture_dynamic_output_shape_ops = group in gnn_models.WHOLE
    until = float(given.until)
    alone_when_timed()
    made: dict[str, Made] = {}
    for case in made_of(group, given.cpu):
        if not given.cases or any(case.name.startswith(w) for w in given.cases):
            made[case.name] = Made(case)
    arms = ("eager", "tilestream") if given.cpu else ("eager", "csr", "inductor", "tilestream", "max_autotune")
    arms = [arm for arm in arms if arm not in given.without]
    for arm in arms:
        for one in made.values():
            needed = max(AUTOTUNE_S, AUTOTUNE_CALLS * one.first_s.get("inductor", 0.0)) if arm == "max_autotune" else 0
            if time.time() > until - needed:
                continue
            if arm != "csr" or arm in one.case.others:
                one.add(arm, given.cpu)
            print(json.dumps({"of": one.case.name, "arm": arm, "s": one.first_s.get(arm)}), flush=True)
    print(json.dumps({"ready": list(made)}), flush=True)
    for line in sys.stdin:
        one = made[line.strip()]
        try:
            row = one.measured(given.cpu)
        except Exception as failure:
            row = {"case": one.case.name, "failed": {**one.failed, "measuring": f"{type(failure).__name__}: {failure}"}}
        if given.kernels is not None and row.get("speedup", MISSED) < MISSED:
            try:
                _tell_kernels(one, given.kernels)
            except Exception as failure:
                row["failed"]["kernels"] = f"{type(failure).__name__}: {failure}"[:400]
        if not given.cpu:
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


def _tell_kernels(one: Made, folder: Path) -> None:
    """Which kernels a call of Inductor's and of our arm runs, longest first, beside its regions."""
    from benchmarks.run.whole_models import kernels_of, told
    from tilestream.run import prepare

    found: dict[str, Any] = {arm: kernels_of(one.arms[arm]) for arm in ("inductor", "tilestream") if arm in one.arms}
    for kernels in found.values():
        for kernel in kernels:
            kernel["name"] = kernel["name"][:120]
        kernels[LONGEST:] = [{"others": len(kernels[LONGEST:]), "us": sum(k["us"] for k in kernels[LONGEST:])}]
    found["regions"] = [told(r) for r in prepare.analyses()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{one.case.name.replace('/', '_')}.json").write_text(json.dumps(found, indent=1) + "\n")


class Process:
    """A worker, whose lines a thread reads."""

    def __init__(self, group: str, given: argparse.Namespace, until: float, caches: str) -> None:
        self.group, self.ready, self._said = group, list[str](), queue.Queue[dict[str, Any]]()
        folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TILESTREAM_CACHE_DIR": "ours"}
        environ = {**os.environ, **SETTINGS, **{name: f"{caches}/{folder}" for name, folder in folders.items()}}
        command = [*module_command(given.module), "--of", group, "--until", str(until), *given.cases]
        command += [word for arm in given.without for word in ("--without", arm)]
        command += ["--cpu"] * given.cpu + (["--kernels", str(given.kernels)] if given.kernels else [])
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.running = subprocess.Popen(command, env=environ, **pipes)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
        self._said.put({"ended": True})

    def wait(self, seconds: float) -> dict[str, Any]:
        """The next thing it says, {} where it says nothing in time."""
        try:
            return self._said.get(timeout=max(0.01, seconds))
        except queue.Empty:
            return {}

    def ask(self, case: str) -> None:
        assert self.running.stdin is not None
        print(case, file=self.running.stdin, flush=True)


def measured(
    given: argparse.Namespace, wanted: Sequence[str], write: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Rows of the cases of all groups that are ``wanted``, which ``write`` is told of one by one."""
    started, rows = time.time(), list[dict[str, Any]]()
    until = started + given.seconds * given.share
    with tempfile.TemporaryDirectory() as caches:
        processes = [Process(group, given, until, caches) for group in wanted]
        for process in processes:
            heard: dict[str, Any] = {}
            while "ready" not in heard and "ended" not in heard:
                heard = process.wait(until + given.patience - time.time())
                if not heard:
                    break
            process.ready = heard.get("ready", [])
            if not process.ready:
                print(f"{process.group}: not ready in time, or ended", flush=True)
                process.running.kill()
        print(f"compiled after {time.time() - started:.0f} s", flush=True)
        for process in processes:
            for name in process.ready:
                left = started + given.seconds - time.time()
                if left < 2:
                    break
                process.ask(name)
                row = process.wait(left)
                if "case" in row:
                    rows.append(row)
                    print(line(row), flush=True)
                    write(rows)
            process.running.kill()
    return rows


def _meant(group: str, name: str) -> bool:
    return group.startswith(name) or name.split("/")[0] == group


def line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{arm} {us:.1f}" for arm, us in row.get("us", {}).items())
    gain = f"; {row['speedup']:.2f} over the best" if "speedup" in row else ""
    ratio = f"; error {row['error_ratio']:.2f} of eager's" if "error_ratio" in row else ""
    failed = "".join(f"; {arm} FAILED {why[:160]}" for arm, why in row.get("failed", {}).items())
    return f"{row['case']}: {times} us; floor {row.get('floor_us', 0):.1f}{gain}{ratio}{failed}"


def asked(description: str | None) -> argparse.ArgumentParser:
    """What may be asked for, of any set of cases."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all")
    parser.add_argument("--share", type=float, default=0.55, help="of the seconds that compiling has")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for what was begun in time")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER")
    parser.add_argument("--without", action="append", default=[], metavar="ARM", help="an arm that is left out")
    parser.add_argument("--cpu", action="store_true", help="on our reference machine; kept only where --out says")
    parser.add_argument("--out", type=Path, help="in the place of the repository's results")
    parser.add_argument("--of", help=argparse.SUPPRESS)
    parser.add_argument("--until", help=argparse.SUPPRESS)
    return parser


def began(given: argparse.Namespace, made_of: Callable[[str, bool], Iterator[Case]]) -> int | None:
    """What a process of one group has done, or one without a GPU says: its exit code; None where measuring begins."""
    if given.of:
        worker(given.of, given, made_of)
        return 0
    if not given.cpu and not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 1
    return None


def place(given: argparse.Namespace, usual: Path) -> Path | None:
    """Where rows are kept. Those of the reference machine do not take the place of measured ones."""
    return given.out or (None if given.cpu else usual)


def told_gains(rows: Sequence[dict[str, Any]]) -> None:
    gains = [row["speedup"] for row in rows if "speedup" in row]
    if gains:
        print(f"{len(gains)} cases, geometric mean {statistics.geometric_mean(gains):.3f} over the best of the others")


def main() -> int:
    parser = asked(__doc__)
    parser.set_defaults(module="run.gnn")
    given = parser.parse_args()
    if (code := began(given, cases)) is not None:
        return code
    from tilestream.bench.environment import environment

    where, out = environment(), place(given, RESULTS / "gnn.json")

    def write(rows: Sequence[dict[str, Any]]) -> None:
        made = {"schema": 1, "environment": where, "rows": list(rows)}
        if out is not None:
            out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")

    wanted = [g for g in groups() if not given.cases or any(_meant(g, name) for name in given.cases)]
    told_gains(measured(given, wanted, write))
    return 0


if __name__ == "__main__":
    sys.exit(main())

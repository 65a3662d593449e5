"""FuseFlow's four models at their published sizes on a GPU, beside PyTorch, Inductor, FlexAttention and CPU loops.

    python -m benchmarks.run.sparse_gpu --out benchmarks/results/sparse
    python -m benchmarks.run.sparse_gpu gpt3 --lock FILE --part FILE.json     one model, which waits for others to time
    python -m benchmarks.run.sparse_gpu --join FILE.json ... --out FOLDER     the table of such parts

``ours``: ``sparse run --target cuda``, the faster of pipelines and PyTorch's operators in each place; ``pipelines``:
these wherever one can be. Every arm is a CUDA graph, arms in turn, medians, in microseconds; what no graph can hold is
left out. Errors are relative, against the same model in float64. ``cycles``: of the cycle simulator at the fusion that
takes fewest, from the other studies of this folder. Needs an H100 or H200.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from benchmarks.lib.places import RESULTS
from benchmarks.lib.sparse_peers import Flexible, autoencoded, over_edges
from tilestream.apps.sparse import GPT3, bigbird_mask
from tilestream.bench.environment import environment
from tilestream.run import oracle, timing
from tilestream.sparse import Schedule, compile, graphs
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.pipelines import PipelineProgram
from tilestream.sparse.pipelines.report import predicted_us
from tilestream.sparse.reproduce import models
from tilestream.sparse.reproduce.models import Case
from tilestream.sparse.reproduce.study import Cell, Study

FOLDER = RESULTS / "sparse"
MODELS = ("gcn", "graphsage", "sae", "gpt3")
SETS = ("cora", "cora_ml", "dblp", "collab")
DENSE_NODES = 20_000
"""Nodes up to which an adjacency is multiplied as a dense matrix too."""
ARMS = ("ours", "pipelines", "eager", "torch.sparse", "Inductor", "FlexAttention")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """A model on its data, with the arms that are to be timed: calls that give the output on the device."""

    model: str
    data: str
    dtype: torch.dtype
    exact: Tensor
    arms: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    loops: Callable[[], float] | None = None


def loops(case: Case) -> Callable[[], float]:
    """Milliseconds of a call of the CPU loops in float32, the fastest of three; compiled here."""
    module, inputs = copy.deepcopy(case.module).float(), tuple(x.float() for x in case.inputs)
    program = CpuProgram(compile(module, *inputs, formats=case.formats))
    program.run(*inputs)
    return lambda: 1000 * min(program.run(*inputs).seconds for _ in range(3))


def ours(row: Row, case: Case) -> None:
    """The two arms of ours, what runs where, and what the simulator predicts of the pipelines."""
    program = compile(case.module, *case.inputs, formats=case.formats, schedule=Schedule(fuse="none"))
    for name in ("pipelines", "ours"):
        bound = PipelineProgram(program, "cuda", row.dtype, choose=name == "ours").bind()
        row.arms[name] = lambda bound=bound: bound()[0]
        count = sum(step.lowered is not None for step in bound.steps)
        row.cells |= {f"{name}: pipelines": count, f"{name}: by PyTorch": len(bound.steps) - count}
        if name == "pipelines":
            known = {(s.lowered.pipeline, s.lowered.matrix): predicted_us(s) for s in bound.steps if s.lowered}
            each = [known[s.lowered.pipeline, s.lowered.matrix] or 0.0 for s in bound.steps if s.lowered]
            row.cells["pipelines, predicted"] = sum(each)
            row.cells["edges"] = next(s.rows.lengths.total for s in bound.steps if s.rows is not None)


def on_device(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(module).to("cuda", dtype).eval()


def graph_row(make: Callable[..., Case], name: str) -> Row:
    graph = graphs.load(name)
    case = make(graph)
    case = Case(case.name, case.module, case.inputs, {"adjacency": models.DCSR}, case.layers)
    adjacency, x = (t.to("cuda") for t in case.inputs)
    wide = on_device(case.module, torch.float64)
    row = Row(case.name.split()[0], graph.name, torch.float32, wide(adjacency, x))
    ours(row, case)
    module, near, features = on_device(case.module, row.dtype), adjacency.float(), x.float()
    row.arms["torch.sparse"] = partial(module, near, features)
    if graph.nodes <= DENSE_NODES:
        row.arms["eager"] = partial(module, near.to_dense(), features)
    row.arms["Inductor"] = partial(torch.compile(over_edges(module), dynamic=False), *edges_of(near), features)
    row.loops = loops(case)
    return row


def edges_of(adjacency: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of a CSR matrix."""
    entries = adjacency.to_sparse_coo()
    return entries.indices()[0].clone(), entries.indices()[1].clone(), entries.values()


def autoencoder(density: float) -> Row:
    case = models.sae(224 * 224, 256, 32, density)
    (images,) = (t.to("cuda") for t in case.inputs)
    exact = on_device(case.module, torch.float64)(images)
    row = Row("SAE", f"ImageNet, weights {density:.0%} full", torch.float32, exact)
    ours(row, case)
    module, narrow = on_device(case.module, row.dtype), images.float()
    row.arms["eager"] = partial(module, narrow)
    row.arms["Inductor"] = partial(torch.compile(module, dynamic=False), narrow)
    row.arms["torch.sparse"] = autoencoded(module, narrow)
    row.loops = loops(case)
    return row


@cache
def decoders(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """GPT-3 on the device, and the same with each decoder compiled by Inductor."""
    module = on_device(GPT3(), dtype)
    compiled = copy.deepcopy(module)
    for decoder in compiled.get_submodule("decoders").children():
        decoder.compile(dynamic=False)
    return module, compiled


def gpt3(dtype: torch.dtype, block: int) -> Row:
    module, inductor = decoders(dtype)
    x = torch.randn(1024, 768, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = bigbird_mask(1024, block)
    exact = on_device(GPT3(), torch.float64)(x.to("cuda"), mask.to("cuda"))
    row = Row("GPT-3", f"BigBird, blocks of {block}", dtype, exact)
    case = Case("gpt3", GPT3(), (x, mask), {"mask": models.DCSR}, lambda n: (n,))
    ours(row, case)
    narrow = x.to("cuda", row.dtype)
    row.arms["eager"] = partial(module, narrow, mask.to("cuda", row.dtype))
    row.arms["Inductor"] = partial(inductor, narrow, mask.to("cuda", row.dtype))
    row.arms["FlexAttention"] = partial(Flexible(module, 1024, block), narrow)
    return row


def rows_of(model: str, given: argparse.Namespace) -> list[Callable[[], Row]]:
    """What makes each row of a model."""
    if model == "sae":
        return [partial(autoencoder, density) for density in (0.5, 0.1)]
    if model == "gpt3":
        return [partial(gpt3, DTYPES[dtype], block) for dtype in given.dtype for block in (64, 32, 16)]
    make = models.gcn if model == "gcn" else models.graphsage
    return [partial(graph_row, make, name) for name in given.sets or SETS]


def measured(row: Row) -> dict[str, Cell]:
    """The row of the table: errors, the same bits twice, times.

    Raises:
        AssertionError: ours gives other bits the second time.
    """
    assert all(torch.equal(row.arms[name](), row.arms[name]()) for name in ("ours", "pipelines")), row.data
    errors: dict[str, float] = {}
    captured: dict[str, timing.Captured] = {}
    for name in ARMS:
        if name not in row.arms:
            continue
        try:
            errors[name] = oracle.error(row.arms[name]().double(), row.exact)
            captured[name] = timing.capture(row.arms[name])
        except Exception as failure:  # another's arm: the row says that it is not there
            if name in ("ours", "pipelines"):
                raise
            print(f"{row.data}: {name}: {str(failure).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
    samples = timing.interleaved(list(captured.values()), timing.ROUNDS)
    us = {name: statistics.median(found) for name, found in zip(captured, samples, strict=True)}
    others = [t for name, t in us.items() if name not in ("ours", "pipelines")]
    found: dict[str, Cell] = {"model": row.model, "data": row.data, "dtype": str(row.dtype).removeprefix("torch.")}
    found |= {"edges": row.cells["edges"]}
    found |= {name: us.get(name) for name in ARMS}
    found |= {"gain": min(others) / us["ours"] if others else None}
    found |= {k: v for k, v in row.cells.items() if k != "edges"}
    own = [e for name, e in errors.items() if name not in ("ours", "pipelines")]
    return found | {
        "error": errors["ours"],
        "pipelines' error": errors["pipelines"],
        "eager's error": errors.get("eager", own[0] if own else None),
        "CPU loops": None if row.loops is None else 1000 * row.loops(),
    }


def cycles(row: dict[str, Cell]) -> Cell:
    """Of the cycle simulator, at the fusion that takes fewest; of the autoencoder at a share of the pixels."""
    model, data = str(row["model"]), str(row["data"]).split("-like")[0]
    name = {"GPT-3": "gpt3", "SAE": "sae"}.get(model, model.lower())
    rows = Study.read(FOLDER / f"{name}.json").rows
    if model == "GPT-3":
        block = int(data.split()[-1])
        wanted = [r for r in rows if r["tokens x width"] == "1024 x 768" and r["mask's block"] == block]
        wanted = [r for r in wanted if r["values"] == "scalars"]
    elif model == "SAE":
        share = data.split("weights ")[1]
        wanted = [r for r in rows if "imagenet" in str(r["data"]) and f"weights {share}" in str(r["data"])]
    else:
        wanted = [r for r in rows if str(r["data"]).removeprefix(f"{model} on ").split("-like")[0] == data]
    found = [int(str(r["cycles"])) for r in wanted]
    return min(found) * (4 if model == "SAE" else 1) if found else None


NOTES = (
    "Microseconds on one {gpu}: CUDA graphs, all arms of a row in turn, medians. `ours`: what `tilestream sparse run "
    "--target cuda` does, the faster of a pipeline and PyTorch's operators in each place, both timed at the first "
    "call; `pipelines`: these wherever one can be. `gain`: the fastest of the others over `ours`.",
    "`eager`: the module on dense tensors (adjacency or mask dense); `torch.sparse`: its CSR matrices; `Inductor`: of "
    "graphs with a gather and an `index_add` an edge, else of dense tensors; `FlexAttention`: compiled, by a block "
    "mask of 128, whose `mask_mod` looks the block up.",
    "`CPU loops`: a whole call of `--target cpu` in float32 on the host of the GPU, on {threads} threads.",
    "`cycles`: the cycle simulator's, at the fusion that takes fewest (the autoencoder's at a quarter of the pixels, "
    "four times). At a gigahertz a million cycles are a millisecond.",
    "Graphs whose name ends in -like are random ones with the set's counts. The autoencoder on NIH-CXR and LUNA16 (512 "
    "units, up to a million pixels) was left out: its weights take minutes to pack on the host.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all by default")
    parser.add_argument("--sets", nargs="*", choices=SETS)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=["bfloat16"], help="of GPT-3")
    parser.add_argument("--lock", type=Path, help="a file: one process times when no other one compiles")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds from the start that it waits for them")
    parser.add_argument("--part", type=Path, help="where this process's rows go")
    parser.add_argument("--join", type=Path, nargs="*", help="parts to make the table of")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began = time.perf_counter()
    if given.join:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in given.join]
        found, where = [row for part in parts for row in part["rows"]], parts[0]["environment"]
    else:
        found, where = run(given), surroundings()
    if given.part:
        given.part.write_text(json.dumps({"rows": found, "environment": where}, indent=1) + "\n", encoding="utf-8")
    if given.out:
        rows = tuple({**row, "cycles": cycles(row)} for row in found)
        notes = tuple(note.format(gpu=where["gpu"], threads=where["threads"]) for note in NOTES)
        study = Study("gpu", "On a GPU", "PyTorch, Inductor and FlexAttention, microseconds", rows, notes)
        made = {**study.json(), "seconds": round(time.perf_counter() - began, 2), "environment": where}
        (given.out / "gpu.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def surroundings() -> dict[str, object]:
    return {**environment(), "threads": torch.get_num_threads()}


@torch.no_grad()
def run(given: argparse.Namespace) -> list[dict[str, Cell]]:
    """Rows of the models, all compiled before one is timed."""
    began = time.perf_counter()
    lock, turn = (open(f"{given.lock}{end}", "w") if given.lock else None for end in ("", ".turn"))
    if lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    rows: list[Row] = []
    for name in given.models or MODELS:
        for make in rows_of(name, given):
            try:
                row = make()
            except Exception:
                traceback.print_exc()
                continue
            for arm in row.arms.values():
                try:
                    arm()
                except Exception as failure:
                    print(f"{row.data}: {str(failure).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
            rows.append(row)
            print(f"{time.perf_counter():.0f}: {row.model} on {row.data} is compiled", flush=True)
    if lock and turn:
        while time.perf_counter() < began + given.wait and not _alone(lock):
            time.sleep(0.2)
        fcntl.flock(turn, fcntl.LOCK_EX)
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(measured(row))
        print(json.dumps(found[-1]), flush=True)
        if given.part:
            given.part.write_text(json.dumps({"rows": found, "environment": surroundings()}) + "\n", encoding="utf-8")
    return found


def _alone(lock: IO[str]) -> bool:
    """Whether no process compiles any more."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


if __name__ == "__main__":
    main()

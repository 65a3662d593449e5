"""Sparse programs as ragged pipelines on the reference machine, PyTorch's operators between them, and the command."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from sparse_modules import Call, rand
from sparse_programs import random_case
from sparse_rows import case as rows_case
from typer.testing import CliRunner

from tilestream import cuda
from tilestream.apps.sparse import GPT3, Attention, bigbird_mask
from tilestream.cli.sparse import app
from tilestream.cuda.host.build import run_on_host
from tilestream.errors import DeviceError, OptionError, SparseError
from tilestream.run import oracle
from tilestream.run.executable import Interpreted, plain
from tilestream.sparse import Format, Schedule, compile, graphs
from tilestream.sparse.pipelines import PipelineProgram, parse_dtype, program, report
from tilestream.sparse.pipelines.attention import attention
from tilestream.sparse.pipelines.placing import Library, Ragged, placed
from tilestream.sparse.program import Program
from tilestream.sparse.reproduce import models

CSF = Format(("compressed", "compressed"))
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def made(module, *inputs, dtype=torch.float32, **formats):
    """The program on its inputs, on the reference machine."""
    compiled = compile(module, *inputs, formats=formats, schedule=Schedule(fuse="none"))
    return PipelineProgram(compiled, "reference", dtype).bind()


def kinds(bound):
    return ["pipeline" if step.lowered is not None else "PyTorch" for step in bound.steps]


def gpt3():
    return GPT3(16, 2, 32, 2), (rand(32, 16), bigbird_mask(32, 8)), {"mask": CSF}


def of(case, **formats):
    return case.module, case.inputs, formats or case.formats


KARATE = graphs.karate()
MODELS = {
    "gcn": (of(models.gcn(KARATE), adjacency=CSF), ["PyTorch", "pipeline"] * 2),
    "graphsage": (of(models.graphsage(KARATE), adjacency=CSF), ["PyTorch", "pipeline"] * 2),
    "sae": (of(models.sae(49, 16, 8, 0.5)), ["pipeline", "pipeline"]),
    "gpt3": (gpt3(), ["PyTorch", "pipeline"] * 2 + ["PyTorch"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_the_papers_models(name, dtype):
    (module, inputs, formats), steps = MODELS[name]
    bound = made(module, *inputs, dtype=dtype, **formats)
    assert kinds(bound) == steps
    with torch.no_grad():
        dense = [x.to_dense() if x.layout != torch.strided else x for x in inputs]
        exact = module(*dense)
        eager = copy.deepcopy(module).to(dtype)(*[x.to(dtype) for x in dense])
    (got,) = bound()
    assert got.dtype == dtype and got.shape == exact.shape
    assert oracle.error(got, exact) <= oracle.tolerance(oracle.error(eager, exact), dtype)
    assert torch.equal(bound()[0], got)


@pytest.mark.parametrize("seed", range(0, 60, 3))
@pytest.mark.every(3)
def test_random_modules_of_rows(seed, monkeypatch):
    monkeypatch.setattr(program, "executable", lambda pipeline, kind, device: plain(pipeline))
    module, adjacency, x = rows_case(seed)
    bound = made(module, adjacency, x, adjacency=CSF)
    assert "pipeline" in kinds(bound)
    with torch.no_grad():
        torch.testing.assert_close(bound()[0].double(), module(adjacency, x), rtol=1e-3, atol=1e-4)


def test_random_programs(monkeypatch):
    monkeypatch.setattr(program, "executable", lambda pipeline, kind, device: plain(pipeline))
    pipelines = 0
    for seed in range(150, 400):
        one = random_case(seed)
        inputs = one.inputs
        compiled = Program(one.program, Schedule(fuse="none"), list(inputs), {}, list(inputs.values()))
        bound = PipelineProgram(compiled, "reference").bind()
        pipelines += kinds(bound).count("pipeline")
        for name, got in zip(one.program.outputs, bound(), strict=True):
            torch.testing.assert_close(
                got.double(), torch.from_numpy(np.array(one.values[name])), rtol=2e-4, atol=2e-4, msg=f"{seed}: {name}"
            )
    assert pipelines > 5


def test_other_values_of_the_same_program():
    module = Call(lambda a, x: torch.relu(a @ x))
    given = rand(9, 9, density=0.3).to_sparse_csr(), rand(9, 4)
    compiled = PipelineProgram(compile(module, *given), "reference")
    other = rand(9, 9, density=0.2, seed=5).to_sparse_csr(), rand(9, 4, seed=6)
    for inputs in (given, other):
        (got,) = compiled.run(*inputs)
        torch.testing.assert_close(got, module(inputs[0].to_dense(), inputs[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function, steps",
    [
        (lambda a, x: a @ x, ["pipeline"]),
        (lambda a, x: a.t() @ x, ["pipeline"]),
        (lambda a, x: x.t() @ a, ["pipeline"]),
        (lambda a, x: torch.relu(a @ x) + x, ["pipeline"]),
        (lambda a, x: torch.softmax(a @ x, -1), ["pipeline"]),
        (lambda a, x: (a * (x @ x.t())) @ x, ["pipeline"]),
        (lambda a, x: (a @ x) + (a @ torch.tanh(x)), ["PyTorch", "pipeline"]),  # both sums in one
        (lambda a, x: a @ (a @ x), ["pipeline", "pipeline"]),
    ],
)
@pytest.mark.every(3)
def test_what_is_one_pipeline(function, steps):
    """Rows without entries, and a column that nobody has."""
    a, x = rand(8, 8, density=0.3, seed=3), rand(8, 5)
    a[2], a[:, 4] = 0, 0
    bound = made(Call(function), a.to_sparse_csr(), x)
    assert kinds(bound) == steps
    torch.testing.assert_close(bound()[0].double(), function(a, x), rtol=1e-5, atol=1e-5)


def test_layers_of_pytorch_geometric_and_what_has_no_dense_operator():
    layers = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    x, edges = rand(20, 8), torch.randint(0, 20, (2, 60))
    for layer in (layers.GCNConv(8, 4), layers.SAGEConv(8, 4), layers.GINConv(torch.nn.Linear(8, 4))):
        module = layer.eval().double()
        bound = made(module, x, edges)
        assert kinds(bound).count("pipeline") == 1
        with torch.no_grad():
            torch.testing.assert_close(bound()[0].double(), module(x, edges), rtol=1e-5, atol=1e-5)
    with pytest.raises(SparseError, match="adjacency.*use --target cpu"):
        made(layers.GATConv(8, 4).eval().double(), x, edges)


def test_operators_that_are_only_called():
    a, x = rand(8, 8, density=0.4).to_sparse_csr(), rand(8, 5)
    module = Call(lambda a, x: torch.sort(a @ x, dim=0).values * 2)
    bound = made(module, a, x)
    assert [len(step.statements) for step in bound.steps] == [1, 1, 1] and kinds(bound)[0] == "pipeline"
    torch.testing.assert_close(bound()[0].double(), module(a.to_dense(), x), rtol=1e-5, atol=1e-5)


def test_a_matrix_that_stores_nothing():
    a, x = torch.zeros(5, 5, dtype=torch.float64).to_sparse_csr(), rand(5, 3)
    bound = made(Call(lambda a, x: torch.relu(a @ x) + x), a, x)
    torch.testing.assert_close(bound()[0].double(), x, rtol=1e-6, atol=1e-6)


def why(function, *inputs, **formats):
    """What is said of the statements that PyTorch runs."""
    compiled = compile(Call(function), *inputs, formats=formats or None, schedule=Schedule(fuse="none"))
    return [p.why for p in placed(compiled.einsums, "f32")[1] if isinstance(p, Library)]


def test_why_not_a_pipeline():
    a, x = rand(8, 8, density=0.4).to_sparse_csr(), rand(8, 5)
    assert "a product of dense matrices" in why(lambda a, x: torch.relu(x @ x.t()) @ (a @ x), a, x)
    assert "it makes something of what is not stored" in why(lambda a, x: torch.exp(a) @ x, a, x)
    assert "it makes something of what is not stored" in why(lambda a, x: (a / x[:, :1]) @ x, a, x)  # 0 over 0
    assert any("each entry is read by other statements" in w for w in why(lambda a, x: a * (x @ x.t()), a, x))
    assert any("zeros that are not stored" in w for w in why(lambda a, x: (a @ x) + (a * 2).amax(1)[:, None], a, x))
    assert "it reads two sparse matrices" in why(
        lambda a, b, x: (a * b) @ x, a, rand(8, 8, density=0.3).to_sparse_csr(), x
    )


def test_of_two_sparse_factors_the_fuller_one_is_made_dense():
    a, b = rand(9, 8, density=0.2).to_sparse_csr(), rand(8, 5, density=0.6, seed=1).to_sparse_csr()
    for left, right in ((a, b), (b.to_dense().t().to_sparse_csr(), a.to_dense().t().to_sparse_csr())):
        bound = made(Call(lambda a, b: a @ b), left, right)
        (step,) = bound.steps
        assert step.lowered is not None and step.rows is not None and step.rows.lengths.total == a.values().numel()
        want = left.to_dense() @ right.to_dense()
        torch.testing.assert_close(bound()[0].double(), want, rtol=1e-5, atol=1e-6)


def test_features_that_no_kernel_holds_stay_with_pytorch():
    a, x = rand(8, 8, density=0.4).to_sparse_csr(), rand(8, 20_000)
    (reason,) = set(why(lambda a, x: a @ x, a, x))
    assert "registers" in reason or "wide" in reason
    torch.testing.assert_close(
        made(Call(lambda a, x: a @ x), a, x)()[0].double(), a.to_dense() @ x, rtol=1e-4, atol=1e-4
    )


def test_a_matrix_too_large_to_be_dense_is_multiplied_as_a_sparse_one(monkeypatch):
    monkeypatch.setattr(program, "MOST", 10)
    a, x = rand(8, 9, density=0.4).to_sparse_csr(), rand(9, 20_000)
    dense = a.to_dense()
    for function, right in (
        (lambda a, x: a @ x, x),
        (lambda a, x: x.t() @ a.t(), x),
        (lambda a, x: a.t() @ x, rand(8, 20_000)),
        (lambda a, x: x @ a, rand(20_000, 8)),
    ):
        bound = made(Call(function), a, right)
        assert kinds(bound) == ["PyTorch"]
        torch.testing.assert_close(bound()[0].double(), function(dense, right), rtol=1e-4, atol=1e-4)
    with pytest.raises(SparseError, match="would read .* as a dense tensor.*--target cpu"):
        made(Call(lambda a, x: torch.exp(a) @ x), a, x)


def test_attention_is_one_softmax_over_entries_and_pytorch_has_a_call_of_it():
    mask = bigbird_mask(16, 4)
    q, k, v = (rand(3, 16, 8, seed=s) for s in range(3))
    compiled = compile(Attention(), q, k, v, mask, formats={"mask": CSF}, schedule=Schedule(fuse="none"))
    (piece,) = placed(compiled.einsums, "f32")[1]
    assert isinstance(piece, Ragged)
    ops = piece.lowered.pipeline.stages[0].ops
    assert [op.combine for op in ops if op.kind == "product"] == ["sum", "softmax"]
    found = attention(piece.statements)
    assert found is not None and math.isclose(found.scale, 8**-0.5)
    (got,) = found.call(mask.bool())(q, k, v)
    torch.testing.assert_close(got, Attention()(q, k, v, mask))
    torch.testing.assert_close(made(Attention(), q, k, v, mask, mask=CSF)()[0].double(), got, rtol=1e-4, atol=1e-5)
    assert attention(piece.statements[:-1]) is None and attention(piece.statements[1:]) is None


def test_bad_targets(monkeypatch):
    compiled = compile(Call(lambda a, x: a @ x), rand(4, 4, density=0.5).to_sparse_csr(), rand(4, 2))
    with pytest.raises(SparseError, match="use cuda or reference"):
        PipelineProgram(compiled, "tpu")
    with pytest.raises(SparseError, match="float64"):
        PipelineProgram(compiled, "reference", torch.float64)
    with pytest.raises(OptionError, match="float16, float32"):
        parse_dtype("double")
    monkeypatch.setattr(cuda, "available", lambda: "no CUDA GPU is visible to torch")
    with pytest.raises(DeviceError, match="no CUDA GPU is visible.*--target reference"):
        PipelineProgram(compiled, "cuda")


def test_report(monkeypatch):
    (module, inputs, formats), _ = MODELS["gcn"]
    bound = made(module, *inputs, **formats)
    monkeypatch.setattr(bound.of, "target", "cuda")
    monkeypatch.setattr(bound, "times_us", lambda: (20.25, {"pipeline 1": 12.5}))
    told = report.told(bound)
    steps = told["steps"]
    assert [s["runs"] for s in steps] == ["PyTorch", "pipeline"] * 2
    assert steps[0]["statements"][0]["why"] == "a product of dense matrices" and steps[0]["predicted_us"] is None
    assert 1 < steps[1]["predicted_us"] < 100 and steps[1]["us"] == 12.5 and steps[1]["edges"].startswith("mean 4.6")
    assert sum(one["cycles"] or 0 for s in steps for one in s["statements"]) > 10_000
    shown = report.table("gcn", told)
    assert shown.title == "gcn: 4 steps, 20.2 us" and shown.row_count == sum(len(s["statements"]) for s in steps)


MODULE = """
from tilestream.sparse import graphs
from tilestream.sparse.reproduce import models
def make():
    case = models.gcn(graphs.karate())
    return case.module, case.inputs
"""


def test_command(tmp_path: Path):
    file = tmp_path / "model.py"
    file.write_text(MODULE, encoding="utf-8")
    arguments = [
        "run",
        f"{file}:make",
        "--target",
        "reference",
        "--dtype",
        "bfloat16",
        "--json",
        str(tmp_path / "o.json"),
    ]
    ran = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert "4 steps" in ran.output and "a product of dense matrices" in ran.output
    assert re.search(r"relative error \S+ against float64, within twice bfloat16's own", ran.output)
    told = json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))
    assert told["ok"] and told["runs on"] == "reference" and [s["step"] for s in told["steps"]][1] == "pipeline 1"


@pytest.mark.skipif(not cuda.available(), reason="there is a GPU")
def test_command_without_a_gpu(tmp_path: Path):
    file = tmp_path / "model.py"
    file.write_text(MODULE, encoding="utf-8")
    ran = CliRunner().invoke(app, ["run", f"{file}:make", "--target", "cuda"])
    assert ran.exit_code == 2 and "--target reference" in ran.output
    ran = CliRunner().invoke(app, ["run", f"{file}:make", "--target", "reference", "--depth", "3"])
    assert ran.exit_code == 2 and "leave it out" in ran.output


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("name", ["graphsage", "sae", "gpt3"])
def test_the_kernels_on_the_host(name, monkeypatch):
    """The CUDA source of each pipeline, compiled by g++."""
    monkeypatch.setattr(program, "executable", lambda pipeline, kind, device: Interpreted(pipeline, run_on_host))
    (module, inputs, formats), _ = MODELS[name]
    (got,) = made(module, *inputs, **formats)()
    with torch.no_grad():
        exact = module(*[x.to_dense() if x.layout != torch.strided else x for x in inputs])
    assert oracle.error(got, exact) < 2e-6


def test_what_kernels_were_told_of_stays(monkeypatch):
    """They know addresses alone: a copy of an input in another order must live as long as the step."""
    told = []

    class Watched(Interpreted):
        def bind(self, tensors, rows, written):
            told.extend(weakref.ref(t) for t in tensors.values())
            return lambda new: [t.zero_() for t in new]

    monkeypatch.setattr(program, "executable", lambda pipeline, kind, device: Watched(pipeline, plain))
    (module, inputs, formats), _ = MODELS["sae"]
    bound = made(module, *inputs, **formats)
    gc.collect()
    assert told and all(ref() is not None for ref in told) and bound.steps


@pytest.mark.gpu
@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_on_a_gpu(name, choose):
    (module, inputs, formats), _ = MODELS[name]
    dtype = torch.bfloat16
    compiled = compile(module, *inputs, formats=formats, schedule=Schedule(fuse="none"))
    bound = PipelineProgram(compiled, "cuda", dtype, choose=choose).bind()
    dense = [x.to_dense() if x.layout != torch.strided else x for x in inputs]
    with torch.no_grad():
        exact, eager = module(*dense), copy.deepcopy(module).to(dtype)(*[x.to(dtype) for x in dense])
    (got,) = bound()
    assert oracle.error(got.cpu(), exact) <= oracle.tolerance(oracle.error(eager, exact), dtype)
    assert torch.equal(bound()[0], got)
    if not choose:
        assert "pipeline" in kinds(bound)
        return
    assert all(step.other_us is not None for step in bound.steps if step.lowered is not None)
    whole, each = bound.times_us()
    assert whole > 0 and each.keys() == {step.name for step in bound.steps}


@pytest.mark.gpu
def test_rows_of_many_entries_and_float32_on_a_gpu():
    """Rows that several CTAs share, rows without entries, and more entries than a tile of the sort."""
    a = rand(50, 3000, density=0.02)
    a[7] = rand(3000, density=0.9, seed=1)
    a[9] = 0
    x = rand(3000, 20, seed=2)
    compiled = compile(Call(lambda a, x: torch.relu(a @ x)), a.to_sparse_csr(), x, schedule=Schedule(fuse="none"))
    (got,) = PipelineProgram(compiled, "cuda", choose=False).run()
    assert oracle.error(got, torch.relu(a @ x)) < 2e-6


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path: Path):
    file = tmp_path / "model.py"
    file.write_text(MODULE, encoding="utf-8")
    ran = CliRunner().invoke(app, ["run", f"{file}:make", "--target", "cuda", "--dtype", "bfloat16"])
    assert ran.exit_code == 0, ran.output
    assert re.search(r"4 steps, [\d.]+ us", ran.output)

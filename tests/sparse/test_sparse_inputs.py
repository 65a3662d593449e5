"""What users give instead of what is wanted: files that lie, arrays of other libraries, modules in train mode."""

import time
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from sparse_modules import Call, agree, rand
from test_sparse_cli import call
from torch import nn
from typer.testing import CliRunner

from tilestream.cli.progress import first_compilation
from tilestream.cli.sparse import app
from tilestream.errors import SparseError
from tilestream.sparse import compile, compile_einsum
from tilestream.sparse.dot import from_dot
from tilestream.sparse.program import Program
from tilestream.sparse.search import search

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

X, A = rand(6, 4, seed=1), rand(6, 6, density=0.4, seed=2)
HEAD = "%%MatrixMarket matrix coordinate"
FILES = {
    "complex": (f"{HEAD} complex general\n2 2 1\n1 1 1.0 2.0\n", "complex numbers"),
    "overflow": (f"{HEAD} real general\n99999999999999999999999 3 1\n1 1 1.0\n", "no Matrix Market file"),
    "rows": (f"{HEAD} real general\n1000000000000 1000000000000 1\n1 1 1.0\n", "63 bits"),
    "entries": (f"{HEAD} real general\n3 3 1000000000000\n1 1 1.0\n", "has 1,000,000,000,000 entries"),
    "array": ("%%MatrixMarket matrix array real general\n1000000 1000000\n1.0\n", "entries"),
    "lines": ("%%MatrixMarket matrix array real general\n3 3\n3 1 0\n1 4 0\n1 4 -inf", "one number"),
    "negative": (f"{HEAD} real general\n-3 3 1\n1 1 1.0\n", "mtx"),
    "outside": (f"{HEAD} real general\n3 3 1\n7 1 1.0\n", "no Matrix Market file"),
    "short": (f"{HEAD} real general\n3 3 3\n1 1 1.0\n", "no Matrix Market file"),
    "words": (f"{HEAD} real general\n3 3 1\n1 1 one\n", "no Matrix Market file"),
    "nothing": ("", "no Matrix Market file"),
    "column": (f"{HEAD} real general\n1000000000000 1 1\n1 1 1.0\n", "vector of 1,000,000,000,000 elements"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_say_what_cannot_be(name, tmp_path: Path):
    text, says = FILES[name]
    path = tmp_path / "a.mtx"
    path.write_text(text)
    einsum = "i->" if name == "column" else "ij->i"
    assert says in call("run", einsum, str(path), code=2)


def test_a_matrix_of_many_rows_is_an_answer(tmp_path: Path):
    path = tmp_path / "a.mtx"
    path.write_text(f"{HEAD} real general\n1000000000000 5 2\n1 1 1.5\n900000000000 2 2.5\n")
    assert "within" in call("run", "ij->j", str(path))
    assert "within" in call("run", "ij->i", str(path))


def test_numbers_that_are_not_finite_are_explained(tmp_path: Path):
    path = tmp_path / "a.mtx"
    path.write_text(f"{HEAD} real general\n2 2 2\n1 1 inf\n1 2 1.0\n")
    assert "infinities" in call("run", "ik,kj->ij", str(path), str(path), code=1)


def test_operands_of_numpy_and_scipy():
    b = rand(6, 3, seed=3)
    for left in (
        A.numpy(),
        scipy.sparse.csr_matrix(A.numpy()),
        scipy.sparse.coo_array(A.numpy()),
        A.numpy()[::-1][::-1],
    ):
        program = compile_einsum("ik,kj->ij", [left, b.numpy()])
        torch.testing.assert_close(program.run().output, A @ b)
        torch.testing.assert_close(program.run(left, b.numpy()).output, A @ b)
    torch.testing.assert_close(compile(Call(torch.matmul), A.numpy(), b).run(A.numpy(), b).output, A @ b)
    for wrong in ([[1.0]], np.array(["a"]), np.array([object()]), None, A.to("meta"), A.to(torch.complex64)):
        with pytest.raises(SparseError):
            compile_einsum("ij->i", [wrong])
    with pytest.raises(SparseError, match="names"):
        compile_einsum("ij->i", [A], names=["a", "b"])


def test_a_sparse_parameter_from_a_shell(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Fixed(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Parameter(torch.eye(4).to_sparse_csr(), False)\n        self.lin = nn.Linear(3, 2)\n\n"
        "    def forward(self, x):\n        return self.lin(torch.sparse.mm(self.a, x))\n\n\n"
        "def make():\n    return Fixed(), (torch.randn(4, 3),)\n"
    )
    assert "within 1e-09" in call("run", f"{path}:make")


def test_a_graph_of_an_unknown_mode():
    dot = (
        'digraph SAM {\n 0 [comment="type=fiberlookup,index=i,tensor=B,mode=x,format=compressed,src=true,root=true"]\n}'
    )
    with pytest.raises(SparseError):
        from_dot(dot)


class Own(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)


TRAINED = {
    "batch norm": nn.BatchNorm1d(4),
    "dropout": nn.Dropout(0.3),
    "functional": Call(lambda x: F.dropout(x, 0.3, True)),
    "statistics": Call(lambda x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), training=True)),
    "attention": nn.TransformerEncoderLayer(4, 1, 8, 0.1, batch_first=True),
}


@pytest.mark.parametrize("name", TRAINED)
def test_train_mode_is_refused_where_it_is_not_what_runs(name):
    module = Own(TRAINED[name]).double().train()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(SparseError) as refused:
        compile(module, X)
    assert ".eval()" in refused.value.remedy and module.training and module.part.training
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    if name in ("batch norm", "dropout", "attention"):
        module.eval()
        torch.testing.assert_close(compile(module, X).run(X).output, module(X), rtol=1e-6, atol=1e-6)


def test_train_mode_runs_where_it_can():
    norm = nn.BatchNorm1d(4, track_running_stats=False).double()
    for module in (Own(norm).train(), Own(nn.Dropout(0.0)).train(), Own(nn.Linear(4, 3).double()).train()):
        torch.testing.assert_close(compile(module, X).run(X).output, module(X))
    agree(Own(norm), X)
    image = nn.BatchNorm2d(3, track_running_stats=False).double()
    agree(Own(image), rand(2, 3, 4, 5))


def test_each_part_keeps_its_mode():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double().train()
    module[1].eval()
    torch.testing.assert_close(compile(module, X).run(X).output, module(X))
    assert module.training and not module[1].training


def test_a_module_in_train_mode_from_a_shell(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (torch.randn(5, 3),)\n"
    )
    assert "call .eval()" in call("run", f"{path}:make", code=2)


def test_options_that_mean_nothing_or_too_much(tmp_path: Path):
    path = tmp_path / "a.mtx"
    path.write_text(f"{HEAD} real general\n3 3 2\n1 1 1.5\n2 3 2.5\n")
    product = ("run", "ik,kj->ij", str(path), str(path))
    assert "--depth with --target cpu" in call(*product, "--target", "cpu", "--depth", "4", code=2)
    assert "--engine with --target cpu" in call(*product, "--target", "cpu", "--engine", "spec", code=2)
    assert "PyTorch's threads" in call(*product, "--target", "cpu", "--parallel", "i=2")
    assert "at most 1,024" in call(*product, "--parallel", "i=99999999", code=2)
    assert "at most 1,024" in call(*product, "--parallel", "i=64", "--parallel", "k=64", code=2)
    assert "slots" in call(*product, "--depth", "99999999999999999999", code=2)
    assert "at most 4,096" in call(*product, "--block", "99999999", code=2)
    called = CliRunner().invoke(app, ["simulate", *product[1:]])
    assert called.exit_code == 0 and "simulating 1 region\n" in called.stderr


def test_the_first_compilation_of_the_engine_is_announced(monkeypatch):
    said = []
    monkeypatch.setattr("tilestream.sparse.engine.compiled.go", type("Go", (), {"signatures": []})())
    with first_compilation(said.append, 0.01):
        time.sleep(0.2)
    assert said and "once on this machine" in said[0]


def test_a_missing_cora_is_said_to_be_where(tmp_path: Path):
    assert "linqs.org" in call("reproduce", "defaults", "--cora", str(tmp_path / "cora.cites"), code=2)


def test_a_search_ends_when_its_seconds_are_over():
    a = rand(30, 30, density=0.3, seed=1).to_sparse()

    def make(schedule):
        return compile_einsum("ik,kj,jl->il", [a, a, a], schedule)

    whole = search(make, budget_s=60, slack=1e9)
    short = search(make, budget_s=1e-6, slack=1e9)
    assert len(whole.points) > 3 and len(short.points) == 1
    assert " took " in short.longest


def test_a_simulation_under_way_is_given_up_when_the_seconds_are_over():
    a = rand(30, 30, density=0.3, seed=1).to_sparse()
    ran = []

    class Slow(Program):
        def run(self, *inputs, progress, **options):
            ran.append(self.schedule)
            while len(ran) > 1:  # until it is given up
                time.sleep(0.01)
                progress("still running")
            return super().run(*inputs, **options)

    def make(schedule):
        program = compile_einsum("ik,kj,jl->il", [a, a, a], schedule)
        program.__class__ = Slow
        return program

    found = search(make, budget_s=3.0, slack=1e9)
    assert len(found.points) == 1 and len(ran) == 2 and found.unsimulated > 0

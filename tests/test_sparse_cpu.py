"""Programs as loops: one nest a region, factored as the fusion table is, compiled, and from the command line."""

import json

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_modules import Call, rand
from sparse_programs import random_case
from typer.testing import CliRunner

from tilestream.cli.sparse import app
from tilestream.errors import SparseError
from tilestream.sparse import Format, Schedule, compile, compressed
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.program import Program


def layer(a, x, w):
    return torch.relu(a @ x @ w)


GIVEN = (rand(30, 30, density=0.2).to_sparse_csr(), rand(30, 8), rand(8, 4))
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


@pytest.mark.parametrize("fuse", ["none", "all"])
def test_compiled_loops_and_other_values(fuse):
    module = Call(layer)
    loops = CpuProgram(compile(module, *GIVEN, schedule=Schedule(fuse=fuse)))
    assert len(loops.regions) == (3 if fuse == "none" else 1)
    torch.testing.assert_close(loops.run().output, layer(GIVEN[0].to_dense(), *GIVEN[1:]))
    other = (rand(30, 30, density=0.1, seed=4).to_sparse_csr(), rand(30, 8, seed=5), rand(8, 4, seed=6))
    result = loops.run(*other)
    torch.testing.assert_close(result.output, layer(other[0].to_dense(), *other[1:]))
    assert result.seconds > 0 and result.regions.keys() == loops.regions.keys()


def test_fused_iteration_is_one_nest_with_a_row_between():
    """A X is made row by row inside the loop over the result's rows, and only its row is kept."""
    program = compile(Call(layer), *GIVEN, schedule=Schedule(fuse="all"))
    (region,) = CpuProgram(program, compiled=False).regions.values()
    assert "np.empty(8)" in region.source and "np.empty(240)" not in region.source
    outer = [line for line in region.source.splitlines() if line.startswith("    for ") and "z" not in line]
    assert len(outer) == 1 and "range(30)" in outer[0]


def test_a_compressed_level_drives_its_loop():
    program = compile(
        Call(lambda a, b: a * b), rand(9, 9, density=0.2).to_sparse(), rand(9, 9, density=0.3).to_sparse()
    )
    (region,) = CpuProgram(program, compiled=False).regions.values()
    assert region.source.count("continue") == 2 and "range(9)" not in region.source


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["none", "all"]))
def test_random_programs(seed, fuse):
    case = random_case(seed)
    program = Program(case.program, Schedule(fuse=fuse), list(case.inputs), {}, list(case.inputs.values()))
    try:
        loops = CpuProgram(program, compiled=False)
    except SparseError as error:
        assert "loop is open" in error.cause
        return
    for view, output in zip(program.outputs, loops.run().outputs, strict=True):
        np.testing.assert_allclose(output.numpy(), case.values[view.tensor], rtol=1e-9, atol=1e-9)


def test_what_loops_do_not_do():
    a = rand(8, 8)
    with pytest.raises(SparseError, match="in blocks"):
        CpuProgram(compile(Call(lambda x: x @ x), a, schedule=Schedule(block=4)))
    large = torch.sparse_coo_tensor([[0], [1]], [1.0], (30_000, 30_000), dtype=torch.float64)
    with pytest.raises(SparseError, match="as a dense array"):
        CpuProgram(compile(Call(lambda x: x * 2), large))


def test_formats():
    a = rand(6, 5, density=0.4)
    for form in (compressed(2), Format(("compressed", "compressed"), (1, 0)), Format(("dense", "compressed"), (1, 0))):
        for fuse in ("none", "all"):
            schedule = Schedule(fuse=fuse)
            program = compile(
                Call(lambda a, x: (a @ x).softmax(1)), a, rand(5, 3), formats={"args0": form}, schedule=schedule
            )
            got = CpuProgram(program, compiled=False).run(a, rand(5, 3)).output
            torch.testing.assert_close(got, (a @ rand(5, 3)).softmax(1))


def test_from_a_shell(tmp_path):
    files = []
    for seed, name in enumerate("BC"):
        files.append(str(tmp_path / f"{name}.mtx"))
        scipy.io.mmwrite(files[-1], scipy.sparse.random(40, 40, 0.1, random_state=seed))
    result = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["run", "ik,kj->ij", *files, "--target", "cpu", "--json", str(result)])
    assert done.exit_code == 0 and "ms on one core" in done.output and "within 1e-09" in done.output
    assert json.loads(result.read_text())["seconds"] > 0
    assert CliRunner().invoke(app, ["run", "ik,kj->ij", *files, "--target", "gpu"]).exit_code == 2

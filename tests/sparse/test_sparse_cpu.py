"""Programs as loops: one nest a region, factored as the fusion table is, compiled, and from the command line."""

import itertools
import json
import math
import re

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
from tilestream.sparse.cpu.functions import exp, exp32
from tilestream.sparse.cpu.kernels import LISTED, SUMS, product, sum_rows
from tilestream.sparse.cpu.nests import TILE
from tilestream.sparse.cpu.registers import BITS, ROWS
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


def code(function, *inputs, fuse="all", **options):
    """The only region's code, and the largest array that it works in."""
    program = compile(Call(function), *inputs, schedule=Schedule(fuse=fuse), **options)
    (region,) = CpuProgram(program, compiled=False).regions.values()
    return region.source, max([0, *map(int, re.findall(r"np.empty\((\d+), real", region.source))])


def test_fused_iteration_is_one_nest_with_a_panel_between():
    """A X is made for a tile of the result's rows at a time, and only they are kept for the product with W."""
    a = rand(3000, 3000, density=0.002).to_sparse_csr()
    source, largest = code(layer, a, rand(3000, 40), rand(40, 16))
    assert largest == max(TILE * 40, LISTED)
    outer = [line for line in source.splitlines() if line.startswith("    for ")]
    assert len(outer) == 1 and f"range(from_1, to_1, {TILE})" in outer[0]
    assert source.count(" product(") == 1 and source.index(" sum_rows(") < source.index(" product(")


def test_a_product_of_dense_matrices_is_one_call_in_any_order():
    for order in (("i", "k", "j"), ("k", "j", "i"), ("j", "i", "k")):
        module, given = Call(lambda x, w: x @ w), (rand(9, 5), rand(5, 7))
        loops = CpuProgram(compile(module, *given, schedule=Schedule(order=order)), compiled=False)
        assert "for " not in loops.source and loops.source.count("product(") == 1
        torch.testing.assert_close(loops.run().output, given[0] @ given[1])


def test_a_batch_of_products_in_an_order_that_reduces_first():
    module, given = Call(lambda x, y: torch.bmm(x, y)), (rand(3, 9, 6), rand(3, 6, 5))
    (region,) = compile(module, *given).regions
    for order in itertools.permutations(region.order):
        loops = CpuProgram(compile(module, *given, schedule=Schedule(order=order)), compiled=False)
        assert loops.source.count("for ") == loops.source.count("product(") == 1
        torch.testing.assert_close(loops.run().output, torch.bmm(*given))


def test_what_is_costly_is_computed_once():
    source, _ = code(lambda x: x.softmax(1), rand(9, 5))
    assert source.count("exp(v_") == 1


def test_sums_of_rows_longer_than_a_list():
    """A row with more neighbours than are listed at a time, empty rows, and more rows than one call sums."""
    n = LISTED + 500
    dense = rand(SUMS + 30, n, density=0.05)
    dense[3], dense[5:40] = rand(n, seed=1), 0
    given = (dense.to_sparse_csr(), rand(n, 21))
    for fuse in ("none", "all"):
        for function in (lambda a, x: a @ x, lambda a, x: torch.relu(a @ x) @ x.t()):
            loops = CpuProgram(compile(Call(function), *given, schedule=Schedule(fuse=fuse)), compiled=False)
            assert "sum_rows(" in loops.source
            torch.testing.assert_close(loops.run().output, function(dense, given[1]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vectors, more", [(0, 1), (1, -1), (1, 0), (2, 0), (2, 3), (8, 1)])
@pytest.mark.parametrize("rows", [1, ROWS - 1, 2 * ROWS + 1])
@pytest.mark.every(3)
def test_kernels(rows, vectors, more, dtype):
    """Both kernels against NumPy, with what lies behind their results left alone."""
    columns = vectors * BITS // (8 * np.dtype(dtype).itemsize) + more
    random = np.random.default_rng(rows * columns)
    a, b = random.random((rows, 6)).astype(dtype), random.random((6, columns)).astype(dtype)
    made = np.full(rows * columns + 1, 7.0, dtype)
    near = {"rtol": 1e-5 if dtype == np.float32 else 1e-12}
    product(a.reshape(-1), 0, 6, 1, b.reshape(-1), 0, columns, made, 0, columns, rows, 6, columns)
    np.testing.assert_allclose(made[:-1].reshape(rows, columns), a @ b, **near)
    assert made[-1] == 7
    x, ends = random.random((20, columns)).astype(dtype), np.cumsum(random.integers(0, 4, rows))
    chosen, factors = random.integers(0, 20, ends[-1] + 1), random.random(ends[-1] + 1).astype(dtype)
    lists = chosen * columns, factors, ends
    wanted = [factors[f:e] @ x[chosen[f:e]] for f, e in zip((0, *ends), ends, strict=False)]
    for more in (False, True):
        sum_rows(made, 0, columns, x.reshape(-1), *lists, rows, columns, more)
        wanted[0] = wanted[0] * (1 + more)
        np.testing.assert_allclose(made[:-1].reshape(rows, columns), wanted, **near)
        assert made[-1] == 7


def test_exponential_is_the_c_librarys_within_a_unit_in_the_last_place():
    numbers = np.concatenate([np.linspace(-746, 711, 4001), [0.0, -0.0, 1e308, -1e308, math.inf, -math.inf, math.nan]])
    with np.errstate(over="ignore"):
        wanted = np.exp(numbers)
    np.testing.assert_array_max_ulp(np.array([exp(x) for x in numbers[:-1]]), wanted[:-1], maxulp=2)
    assert math.isnan(exp(math.nan))
    narrow = np.linspace(-104, 90, 4001, dtype=np.float32)
    with np.errstate(over="ignore"):
        wanted = np.exp(narrow)
    np.testing.assert_array_max_ulp(np.array([exp32(x) for x in narrow], np.float32), wanted, maxulp=3)
    low, high, none = (exp32(np.float32(x)) for x in (-math.inf, math.inf, math.nan))
    assert low == 0 and high == math.inf and math.isnan(none)


def test_a_compressed_level_drives_its_loop():
    program = compile(
        Call(lambda a, b: a * b), rand(9, 9, density=0.2).to_sparse(), rand(9, 9, density=0.3).to_sparse()
    )
    (region,) = CpuProgram(program, compiled=False).regions.values()
    assert region.source.count("continue") == 1 and "range(size" not in region.source


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
    assert done.exit_code == 0 and " ms\n" in done.output and "within 1e-09" in done.output
    assert json.loads(result.read_text())["seconds"] > 0
    assert CliRunner().invoke(app, ["run", "ik,kj->ij", *files, "--target", "gpu"]).exit_code == 2

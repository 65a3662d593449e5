"""Sparse tensors of millions of rows and a few entries: answers that stay sparse, and what they are held against."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sparse_modules import Call
from test_sparse_cli import call
from torch import nn

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse import Schedule, checks, compile, compile_einsum, load
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.reference import einsum

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def few(size, seed=0, entries=5):
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(0, 3, (2, entries), generator=generator) * (size // 4)
    return torch.sparse_coo_tensor(at, torch.rand(entries, generator=generator).double(), (size, size)).coalesce()


class Product(nn.Module):
    def forward(self, a, b):
        return torch.sparse.mm(a, b)


@pytest.mark.parametrize("size", [1_000_000, 3_000_000_000])
def test_a_large_product_stays_sparse(size):
    a, b = few(size), few(size, 1)
    wanted = torch.sparse.mm(few(4), few(4, 1)).coalesce()
    program = compile_einsum("ik,kj->ij", [a, b])
    loops = CpuProgram(program)
    assert loops.streamed == ("T",)
    made = [program.run().output, loops.run().output]
    made += [compile(Product(), a, b).run(a, b).output] if size == 1_000_000 else []
    for got in made:
        got = got.coalesce()
        assert got.layout == torch.sparse_coo and got.shape == (size, size)
        assert torch.equal(got.indices(), wanted.indices() * (size // 4))
        torch.testing.assert_close(got.values(), wanted.values())


def test_a_chain_of_large_products_in_loops_and_streams():
    a = few(1_000_000)
    program = compile_einsum("ik,kj,jl->i", [a, a, a], Schedule(fuse="none"))
    loops = CpuProgram(program, compiled=False)
    assert loops.streamed
    wanted = (few(4) @ few(4) @ few(4)).to_dense().sum(1)
    got = loops.run().output
    torch.testing.assert_close(got[:: 1_000_000 // 4][:4], wanted)
    assert torch.equal(got, program.run().output)


@pytest.mark.parametrize("target", ["streams", "cpu"])
def test_two_million_rows_from_a_shell(tmp_path: Path, target):
    path, out = tmp_path / "B.mtx", tmp_path / "X.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real general\n2000000 2000000 3\n1 2 1.5\n2 7 2.0\n7 7 3.0\n")
    said = call("run", "ik,kj->ij", str(path), str(path), "--target", target, "--out", str(out))
    assert "within 1e-09 of sums over coordinates (dense tensors are too large)" in said
    assert ("as streams" in said) == (target == "cpu")
    found = load.read(out)
    assert found.shape == (2_000_000, 2_000_000) and sorted(found.data) == [3, 6, 9]


def test_the_oracle_of_large_products_is_einsum():
    rng = np.random.default_rng(0)
    for text, shapes in (
        ("ik,kj->ij", [(4, 5), (5, 3)]),
        ("ik,kj,jl->il", [(4, 5), (5, 3), (3, 6)]),
        ("ij,ij->i", [(4, 5), (4, 5)]),
        ("ij->j", [(4, 5)]),
        ("ij,jk->", [(4, 5), (5, 2)]),
        ("i,j->ij", [(4,), (5,)]),
    ):
        given = [rng.random(shape) * (rng.random(shape) < 0.4) for shape in shapes]
        wanted = torch.einsum(text, *map(torch.from_numpy, given))
        found = einsum(text, [(np.argwhere(x), x[x != 0]) for x in given], wanted.shape)
        torch.testing.assert_close(found.to_dense(), wanted)


def test_a_large_sparse_difference_is_seen():
    a = few(1_000_000)
    assert checks.difference(a, a) == 0
    assert checks.difference(a, few(1_000_000, 1)) > 0.1
    assert "finite" in str(checks.compare([torch.ones(2)], [torch.tensor([1, torch.nan])]))


def test_a_large_result_that_is_nowhere_zero_is_refused():
    a = few(1_000_000)
    with pytest.raises(SparseError, match="elements"):
        compile(Call(torch.exp), a)
    with pytest.raises(CaptureError, match="compile_einsum"):
        compile(Product(), few(3_000_000_000), few(3_000_000_000))

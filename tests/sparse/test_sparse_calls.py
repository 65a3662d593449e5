"""Whole calls of the loops: operands as they are, float32, threads, parameters and patterns that change."""

import pytest
import torch
from sparse_modules import Call, rand
from torch import nn

from tilestream.sparse import Schedule, compile
from tilestream.sparse.cpu import CpuProgram

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

ADJACENCY = rand(300, 300, density=0.05).to_sparse_csr()
FEATURES, WEIGHT = rand(300, 40), rand(40, 16)


def layer(a, x, w):
    return torch.relu(a @ x @ w)


def single(*tensors):
    return tuple(x.to(torch.float32) for x in tensors)


def test_dense_operands_are_not_copied_and_patterns_are_packed_once():
    given = single(ADJACENCY, FEATURES, WEIGHT)
    loops = CpuProgram(compile(Call(layer), *given), compiled=False)
    first, second = (loops._binding.bind(given, torch.float32) for _ in range(2))
    for name, tensor in (("args1", given[1]), ("args2", given[2])):
        assert first[name].data_ptr() == tensor.data_ptr() and first[name].dtype == torch.float32
    assert first["args0"].pattern is second["args0"].pattern
    assert first["args0"].values.data_ptr() == given[0].values().data_ptr()


@pytest.mark.parametrize("fuse", ["none", "all"])
def test_float32_runs_in_float32_and_any_number_of_threads_gives_the_same(fuse):
    given = single(ADJACENCY, FEATURES, WEIGHT)
    loops = CpuProgram(compile(Call(layer), *given, schedule=Schedule(fuse=fuse)))
    made, threads = [], torch.get_num_threads()
    try:
        for ways in (1, 2, 3):
            torch.set_num_threads(ways)
            made.append(loops.run(*given).output)
    finally:
        torch.set_num_threads(threads)
    assert made[0].dtype == torch.float32 and torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    wanted = layer(ADJACENCY, FEATURES, WEIGHT)
    assert float((made[0] - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(loops.run(ADJACENCY, FEATURES, WEIGHT).output, wanted)  # float64 in float64


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
def test_a_pattern_that_changes_in_place(layout):
    one, other = rand(12, 12, density=0.3), rand(12, 12, density=0.3, seed=1)
    a, x = one.to_sparse(layout=layout), rand(12, 5)
    loops = CpuProgram(compile(Call(lambda a, x: a @ x), a, x), compiled=False)
    torch.testing.assert_close(loops.run(a, x).output, one @ x)
    values = a._values() if layout == torch.sparse_coo else a.values()
    values.mul_(2)
    torch.testing.assert_close(loops.run(a, x).output, 2 * one @ x)
    columns = a._indices()[1] if layout == torch.sparse_coo else a.col_indices() if "csr" in str(layout) else None
    columns = a.row_indices() if columns is None else columns
    columns.copy_(11 - columns)  # the order within a row turns around as well
    swapped = (2 * one).flip(0 if layout == torch.sparse_csc else 1)
    torch.testing.assert_close(loops.run(a, x).output, swapped @ x)
    torch.testing.assert_close(loops.run(other.to_sparse(layout=layout), x).output, other @ x)


def test_a_mask_is_packed_again_when_its_values_change():
    mask, x = rand(9, 9, density=0.5) > 0, rand(9, 9)
    mask[:, 0] = True
    loops = CpuProgram(compile(Call(lambda m, x: x.masked_fill(~m, -1e9).softmax(-1)), mask, x), compiled=False)
    for _ in range(2):
        torch.testing.assert_close(loops.run(mask, x).output, x.masked_fill(~mask, -1e9).softmax(-1))
        mask[:, :4] = True


def test_parameters_are_read_as_they_are_now():
    module, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double(), rand(20, 8)
    loops = CpuProgram(compile(module, x))
    with torch.no_grad():
        torch.testing.assert_close(loops.run(x).output, module(x))
        for parameter in module.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(loops.run(x).output, module(x))


def test_edges_that_share_an_entry_are_summed():
    """A matrix that the edges make, with values that are not known: two edges of one pair, sorted once."""
    ends = torch.tensor([[0, 1, 1, 2, 0], [1, 2, 2, 0, 3]])

    def message(x, w):
        return torch.zeros(4, 3, dtype=x.dtype).index_add(0, ends[1], x[ends[0]] * w.exp()[:, None])

    x, w = rand(4, 3), rand(5)
    loops = CpuProgram(compile(Call(message), x, w), compiled=False)
    for scale in (1.0, 2.0):
        torch.testing.assert_close(loops.run(x, w * scale).output, message(x, w * scale))

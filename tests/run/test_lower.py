"""Lowering: the program of a region, run by the reference machine, means what the model means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import ALL, Case, Fn, linear
from streamed import interpreted
from torch import nn

from tilestream.errors import InputError
from tilestream.graph.capture import capture
from tilestream.graph.selection import Partition, partition
from tilestream.ir.shapes import check_shapes
from tilestream.run import oracle
from tilestream.run.call import apply, ready
from tilestream.run.made_up import random_arguments


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def cut(module: nn.Module, *inputs: Any) -> Partition:
    found = capture(module, inputs)
    assert len(found.graphs) == 1
    return partition(found.graphs[0])


def example(case: Case, dtype: torch.dtype) -> tuple[nn.Module, list[torch.Tensor]]:
    module, shapes = case
    return module.to(dtype), [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(3)
def test_a_module_is_one_region_with_the_same_meaning(name: str):
    module, inputs = example(ALL[name], torch.bfloat16)
    found = cut(module, *inputs)
    assert found.exclusions == ()
    (region,) = found.regions
    check_shapes(region.program)
    assert len(region.operators) == found.operators
    values = random_arguments(region)
    got = interpreted(region).on_values(values)
    with torch.no_grad():
        eager = list(region.graph(*values))
    error, own, good = oracle.judge(got, eager, oracle.in_float64(region.graph, values))
    assert good, f"error {error:.2e}, eager's {own:.2e}"
    for mine, plain in zip(got, eager, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (plain.shape, plain.dtype, plain.stride())


def kinds(found: Partition) -> list[str]:
    return [op.kind for region in found.regions for op in region.program.stages[0].ops]


def test_rms_norm_in_pieces_is_recognised():
    module, inputs = example(ALL["rms_norm"], torch.bfloat16)
    names = kinds(cut(module, *inputs))
    assert "rms_norm" in names and "rsqrt" not in names


def test_a_sliced_linear_becomes_linears_over_rows_of_its_weight():
    module, inputs = example(ALL["gated_wide"], torch.bfloat16)
    found = cut(module, *inputs)
    shapes = [t.shape for t in found.regions[0].program.tensors if len(t.shape) == 2]
    assert shapes == [(300, 9), (300, 9), (5, 300)]
    assert "slice" not in kinds(found)


def test_an_input_that_is_split_is_loaded_once():
    module, inputs = example(ALL["split"], torch.bfloat16)
    names = kinds(cut(module, *inputs))
    assert names.count("load") == 1 and names.count("slice") == 2


def test_a_slice_that_leaves_is_a_view_of_the_stored_value():
    module = Fn(lambda m, x: m.layers[0](x).chunk(2, -1), linear(9, 14)).bfloat16()
    found = cut(module, torch.randn(37, 9).bfloat16())
    assert kinds(found) == ["load", "linear", "store"]


def test_a_thin_slice_of_a_wide_input_is_cut_outside():
    module = Fn(lambda m, x: m.layers[0](x[:, 100:103]), linear(3, 13)).bfloat16()
    found = cut(module, torch.randn(37, 1000).bfloat16())
    assert [t.features for t in found.regions[0].program.tensors if t.role == "input"] == [3]


@pytest.mark.parametrize(
    ("slices", "loaded"),
    [
        (((0, 5),), {10}),  # half of it: loaded whole, and cut in the tile
        (((0, 4),), {4}),
        (((0, 2), (5, 8)), {10}),
        (((0, 2), (5, 7)), {2}),
    ],
)
def test_slices_of_less_than_half_of_an_input_are_cut_outside(slices: tuple, loaded: set[int]):
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = [layer(x[:, first:last]) for layer, (first, last) in zip(m.layers, slices, strict=True)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    module = Fn(forward, *(linear(last - first, 13) for first, last in slices)).bfloat16()
    found = cut(module, torch.randn(37, 10).bfloat16())
    assert {t.features for r in found.regions for t in r.program.tensors if t.role == "input"} == loaded


def test_a_slice_that_is_used_inside_and_outside_is_two_views():
    module = Fn(lambda m, x: ((h := m.layers[0](x)[:, 2:6]), m.layers[1](h)), linear(9, 13), linear(4, 5)).bfloat16()
    found = cut(module, torch.randn(37, 9).bfloat16())
    (region,) = found.regions
    assert [t.features for t in region.program.tensors if t.role == "output"] == [13, 5]


def test_names_do_not_depend_on_the_rows():
    module, inputs = example(ALL["layer_norm"], torch.bfloat16)
    (few,) = cut(module, *inputs).regions
    torch._dynamo.reset()
    (many,) = cut(module, torch.randn(123, 9).bfloat16()).regions
    assert few.program == many.program and hash(few.program) == hash(many.program)
    assert (few.rows, many.rows) == (37, 123)


def test_symbolic_rows_give_the_same_program():
    module, inputs = example(ALL["gelu"], torch.bfloat16)
    (static,) = cut(module, *inputs).regions
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(inputs[0], 0)
    (symbolic,) = cut(module, *inputs).regions
    assert symbolic.program == static.program
    assert symbolic.symbols and not static.symbols


def test_every_operation_names_the_users_line():
    module, inputs = example(ALL["gelu"], torch.bfloat16)
    (region,) = cut(module, *inputs).regions
    assert all("modules.py:" in op.source for op in region.program.stages[0].ops)


def test_float64_run_does_not_round():
    module, inputs = example(ALL["casts"], torch.bfloat16)
    (region,) = cut(module, *inputs).regions
    values = random_arguments(region)
    (exact,) = oracle.in_float64(region.graph, values)
    assert exact.dtype == torch.float64
    assert not torch.equal(exact, exact.bfloat16().double())


def test_calls_check_their_arguments():
    module = Fn(lambda m, x, y: m.layers[0](x) + y, linear(9, 13)).bfloat16()
    (region,) = cut(module, torch.randn(37, 9).bfloat16(), torch.randn(37, 13).bfloat16()).regions
    call = interpreted(region).on_values
    values = random_arguments(region)
    wide = next(i for i, v in enumerate(values) if v.shape == (37, 13))
    for wrong, says in (
        (values[wide].float(), "torch.float32 on cpu, compiled for torch.bfloat16"),
        (values[wide][1:], "rows"),
    ):
        with pytest.raises(InputError, match=says):
            call([*values[:wide], wrong, *values[wide + 1 :]])


def test_steps_of_operands():
    matrix = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(apply(matrix, (("t",), ("rows", 1, 3))), matrix.t()[1:3])
    assert torch.equal(apply(matrix[None], (("matrix",),)), matrix)
    assert ready(apply(matrix, (("t",),))).is_contiguous()
    assert apply(torch.zeros(2, 0, 4), (("flatten", 4),)).shape == (0, 4)
    assert apply(torch.ones(1, 1, 5), (("vector", 5), ("rows", 0, 2))).shape == (2,)
    assert apply(torch.ones(1, 1), (("scalar",),)).shape == ()
    assert torch.allclose(apply(torch.full((2,), 3.0), (("rstd", 1.0),)), torch.tensor(0.5))

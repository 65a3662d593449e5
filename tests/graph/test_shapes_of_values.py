"""What a value is to a region follows from its shape: dimensions of size 1, columns, views between views, scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import eager_regions
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tilestream.graph.capture import capture
from tilestream.graph.lowering import Value
from tilestream.graph.selection import Partition, partition
from tilestream.ir.pipeline import Tile
from tilestream.run.oracle import Float64


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    made = {"w1": (1, 16), "w": (16, 16), "n": (9, 16), "x": (9, 16), "b": (2, 9, 16), "r": (9, 9), "k": (5, 9)}
    return {name: (torch.randn(shape) / 2).to(dtype) for name, shape in made.items()}


def regions_of(function: Callable[..., object], *inputs: Tensor) -> Partition:
    return partition(capture(function, inputs).graphs[0])


def check(function: Callable[..., object], *inputs: Tensor, symbolic: Sequence[int] = ()) -> eager_regions.Regions:
    """The regions of ``function`` mean what it means; the rows of the inputs that ``symbolic`` names are symbols."""
    for index in symbolic:
        torch._dynamo.maybe_mark_dynamic(inputs[index], inputs[index].dim() - 2)
    fast, made = eager_regions.compiled(function)
    with torch.no_grad():
        got = pytree.tree_leaves(fast(*inputs))
        plain = pytree.tree_leaves(function(*inputs))
        with Float64():
            exact = pytree.tree_leaves(function(*inputs))
    assert eager_regions.judge(got, plain, exact) == ""
    return made[0]


TURNED: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "pooling": lambda t: F.softmax(F.linear(t["b"], t["w1"]).transpose(1, 2), -1),
    "t": lambda t: F.softmax(F.linear(t["x"], t["w1"]).t(), -1),
    "mT": lambda t: F.log_softmax(F.linear(t["b"], t["w1"]).mT.contiguous(), -1),
    "float": lambda t: F.softmax(F.linear(t["b"], t["w1"]).transpose(1, 2).float(), -1),
    "none": lambda t: F.softmax(F.linear(t["x"], t["w"])[:, None].transpose(1, 2), -1),
    "column for a row": lambda t: F.linear(t["x"], t["w1"]).t() + t["r"],
    "row times matrix": lambda t: F.linear(t["b"], t["n"]) * F.linear(t["b"], t["w1"]).transpose(1, 2),
    "sum": lambda t: F.linear(t["b"], t["w1"]).transpose(1, 2).sum(-1),
    "amax": lambda t: F.linear(t["b"], t["w1"]).permute(2, 0, 1).amax(-1, keepdim=True),
    "var": lambda t: F.linear(t["b"], t["w1"]).transpose(1, 2).var(-1),
    "rms_norm": lambda t: F.rms_norm(F.linear(t["b"], t["w1"]).transpose(1, 2), (9,)),
    "linear": lambda t: F.linear(F.linear(t["b"], t["w1"]).transpose(1, 2), t["k"]),
    "cat": lambda t: torch.cat([F.linear(t["x"], t["w1"]).t(), t["r"][:1]], -1),
    "weight gradient": lambda t: F.linear(t["x"], t["w1"]).t() @ F.linear(t["x"], t["w"]),
    "linear of a mean": lambda t: F.linear(F.linear(t["b"], t["w"]).mean(-1), t["k"]),
    "one row": lambda t: F.linear(t["x"][:1], t["w"]).t() + t["w"],
    "dropped, then turned": lambda t: F.linear(t["b"], t["w1"]).squeeze(-1)[:, None].transpose(0, 1).exp(),
    "scalar": lambda t: F.linear(t["x"][:1], t["w1"]).squeeze().view(1, 1).expand(1, 1) * t["x"],
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("symbolic", [(), (3,), (3, 4)], ids=str)
@pytest.mark.every(6)
def test_dimensions_of_size_1_that_move(name: str, symbolic: tuple[int, ...]):
    given = tensors()
    names = list(given)
    check(lambda *values: TURNED[name](dict(zip(names, values, strict=True))), *given.values(), symbolic=symbolic)


def test_an_operand_is_refused_rather_than_a_region():
    t = tensors()
    found = regions_of(lambda x, w: F.linear(x, w).relu() + F.linear(x, w * 2).relu().t(), t["x"], t["w1"])
    assert [len(r.operators) for r in found.regions] == [3, 2]


def test_views_between_views_cost_no_region():
    """An einsum folds and permutes dimensions of size 1; what comes before and behind it streams together."""
    t = tensors()
    found = regions_of(lambda b, w: torch.einsum("bnd,df->bnf", b.relu(), w).relu(), t["b"], t["w"])
    assert [len(r.operators) for r in found.regions] == [3]


def test_a_value_is_judged_by_its_shape_alone():
    column, wide = Tile.of("c", 1, "f32"), Tile.of("w", 4, "f32")
    assert Value.of(wide, (3, 4)) == Value(wide, 3)  # pyright: ignore[reportArgumentType]
    assert Value.of(column, (3, 1)) == Value(column, 3)  # pyright: ignore[reportArgumentType]
    assert Value.of(column, (3, 2)).dropped and Value.of(column, (3, 2)).rows == 6
    assert Value.of(column, ()).dropped and Value.of(column, ()).rows == 1
    assert Value.of(wide, (4, 3)).folded and Value.of(wide, (4, 3)).rows == 3


def test_bounds_of_a_slice_may_be_symbolic():
    def forward(x: Tensor, w: Tensor, like: Tensor) -> Tensor:
        n = like.shape[0]
        return F.linear(F.linear(x, w)[..., :n].sum(-1, keepdim=True) * x, w).relu()

    t = tensors()
    assert check(forward, t["x"], t["w"], torch.randn(5, 2), symbolic=(2,)).taken


SPECIAL = [0.0, -0.0, 1e-6, -1e-6, -1e-4, 0.5, -0.5, -0.69, -0.7, 0.7, 3.0, -3.0, -100.0, 100.0]
INFINITE = [float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.leaky_relu(x, 0.0),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: F.leaky_relu(x, 3.0),
        lambda x: F.leaky_relu(x, -1.0),
        F.elu,
        F.selu,
        lambda x: F.celu(x, 0.5),
        torch.expm1,
    ],
)
def test_special_values_go_as_in_eager(tf32: None, function: Callable[[Tensor], Tensor]):
    """Each alone in its row, since a product spreads a NaN over its row."""
    x = torch.tensor([*SPECIAL, *INFINITE])[:, None].expand(-1, 2).contiguous()

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = function(x)
        return y, F.linear(y, w)

    run = eager_regions.Regions(eager_regions.trace(forward, (x, torch.eye(2))))
    seen = run((x, torch.eye(2)))[0]
    assert run.taken == 2
    torch.testing.assert_close(seen, function(x), rtol=3e-7, atol=0.0, equal_nan=True)


DERIVED = {
    "relu": torch.relu,
    "threshold": lambda h: F.threshold(h, 0.25, 0.0),
    "hardtanh": lambda h: F.hardtanh(h, -0.5, 0.75),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("outs", [1, 5])
@pytest.mark.every(3)
def test_gradients_stream(name: str, outs: int):
    """The derivative of an activation lies in one region with the products beside it."""

    def forward(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(DERIVED[name](F.linear(x, w)), v)

    inputs = [(torch.randn(s) / 2).bfloat16() for s in ((70, 9), (16, 9), (outs, 16))]
    got, (_, backward) = eager_regions.Trained(forward, inputs).run("vertical")
    plain = eager_regions.gradients(forward, inputs)
    with Float64():
        exact = eager_regions.gradients(forward, [x.double() for x in inputs])
    assert eager_regions.judge(got, plain, exact) == ""
    derivative = f"{'threshold' if name in ('relu', 'threshold') else name.split('_')[0]}_backward"
    inside = [op for operators in backward.operators for op in operators]
    assert any(derivative in op for op in inside)


def test_a_gradient_that_is_not_finite_stays_out_of_masked_places():
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).relu()

    x, w = torch.tensor([[1.0], [-1.0]]).expand(2, 2).bfloat16(), torch.eye(2).bfloat16()

    def backward(g: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(g, y, 0) @ w

    y = forward(x, w)
    g = torch.tensor([[1.0, 1.0], [float("inf"), float("nan")]]).bfloat16()
    run = eager_regions.Regions(eager_regions.trace(backward, (g, y, w)))
    assert run.taken == 2 and torch.equal(run((g, y, w))[0], torch.tensor([[1.0, 1.0], [0.0, 0.0]]).bfloat16())


def test_a_product_over_one_element_is_elementwise():
    t = tensors()
    column = t["x"][:, :1]
    found = regions_of(lambda c, v, w: F.linear((c @ v).relu(), w), column, t["w1"], t["w"])
    (region,) = found.regions
    kinds = [op.kind for op in region.program.stages[0].ops]
    assert kinds.count("linear") == 1 and "mul" in kinds
    check(lambda c, v, w: F.linear((c @ v).relu(), w), column, t["w1"], t["w"])
    alone = regions_of(lambda c, v: (c @ v).relu(), column, t["w1"])
    assert not alone.regions


@pytest.mark.parametrize("shape", [(), (1,), (16,), (9, 1)])
def test_what_scales_an_rms_norm_need_not_be_a_vector(shape: tuple[int, ...]):
    def forward(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        h = F.linear(x, w)
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3) * scale

    t = tensors()
    assert check(forward, t["x"], t["w"], torch.randn(shape).bfloat16()).taken == 7


SCALED = {
    "addcmul of a column and a scalar": lambda x, w, w1: torch.addcmul(F.linear(x, w), F.linear(x, w1), w1[0, 0]),
    "clamp of a column": lambda x, w, w1: F.linear(x, w1).clamp(min=0.1).clamp(max=w1[0]) + F.linear(x, w),
    "column as a bias": lambda x, w, w1: torch.addmm(F.linear(x, w1), x, w),
    "column of one input": lambda x, w, w1: F.linear(F.linear(x[:, :1], w[:, :1], w[0]), w),
}


@pytest.mark.parametrize("name", SCALED)
def test_columns_with_scalars_and_vectors(name: str):
    t = tensors()
    assert check(SCALED[name], t["x"], t["w"], t["w1"]).taken >= 2

"""Every elementwise function on every 16-bit number there is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle_runs import run_poisoned
from programs import Program
from torch import Tensor

from tilestream import cuda
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import TILE_ROWS, Pipeline, Role
from tilestream.ir.tileops import OPS

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "gelu_slope": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
}
FARTHEST = 1e7  # beyond, one step of fp32 is about a radian: sine and cosine are noise there
FP32_TINY = torch.finfo(torch.float32).tiny  # results below it may be flushed to zero
# What eager's own fp32 loses as well: 1 + erf(x) near -1. And pi in two parts beside the zeros of sine and cosine.
SLACK: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 2e-7 * x.abs(),
    "gelu_tanh": lambda x: 2e-7 * x.abs(),
    "gelu_slope": lambda x: 2e-7 * (1 + x.abs() * (x.abs() < 8)),
    "sin": lambda x: 4e-7 * (x.abs() > 1),
    "cos": lambda x: 4e-7 * (x.abs() > 1),
}


def pipeline(kind: str, dtype: str, **attrs: float) -> Pipeline:
    p = Program(f"every_{kind}", dtype)
    p.store(p.op(kind, TILE_ROWS, p.load("x", TILE_ROWS), **attrs))
    return p.build()


def every_number(dtype: str) -> Tensor:
    """All 65,536 bit patterns."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(TORCH_DTYPES[dtype]).view(-1, TILE_ROWS).cuda()


def compare(kind: str, x: Tensor, got: Tensor, wanted: Tensor, flushed: float = FP32_TINY):
    """``wanted`` in fp32; off by one step of the dtype at most, which is what a wrong last bit in fp32 may cause.

    Results below ``flushed`` may be zero.
    """
    known = x.abs().float() <= FARTHEST if kind in ("sin", "cos") else torch.ones_like(x, dtype=torch.bool)
    known |= ~x.isfinite()
    rounded = wanted.to(x.dtype)
    assert torch.equal(got.isnan()[known], rounded.isnan()[known]), f"{kind}: NaN elsewhere"
    finite = known & rounded.isfinite() & got.isfinite()
    info = torch.finfo(x.dtype)
    step = info.eps * rounded.float().abs().clamp(min=info.tiny)
    slack = SLACK[kind](x.float()) if kind in SLACK else 0.0
    off = (got.float() - rounded.float()).abs()
    bad = finite & (off > step + flushed + slack)
    assert not bad.any(), f"{kind}: {x[bad][:5].tolist()} give {got[bad][:5].tolist()}, not {rounded[bad][:5].tolist()}"
    # An infinity may become the largest number or the other way round, where the limit is a rounding away.
    infinite = known & (rounded.isinf() | got.isinf())
    near = got.float().clamp(-info.max, info.max) == rounded.float().clamp(-info.max, info.max)
    assert near[infinite].all(), f"{kind}: infinities elsewhere"


def run(one: Pipeline, x: Tensor) -> Tensor:
    name = one.by_role(Role.OUTPUT)[0].name
    return run_poisoned(cuda.build(one), {"x": x}, x.shape[0])[name].cuda()


def test_no_function_is_left_out():
    assert set(FUNCTIONS) == {kind for kind, spec in OPS.items() if spec.family == "unary"} - {"cast"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_number(kind: str, dtype: str):
    x = every_number(dtype)
    # silu's sigmoid is flushed before it is multiplied by x
    flushed = FP32_TINY * (128 if kind == "silu" else 1)
    compare(kind, x, run(pipeline(kind, dtype), x), FUNCTIONS[kind](x.float()), flushed)


@pytest.mark.gpu
@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 0.0), (2.0, 3.0), (0.5, -1.0)])
def test_softplus_takes_its_attributes(beta: float, threshold: float):
    x = every_number("bf16")
    got = run(pipeline("softplus", "bf16", beta=beta, threshold=threshold), x)
    # exp(beta x) is flushed before it is divided by beta
    compare("softplus", x, got, F.softplus(x.float(), beta, threshold), FP32_TINY * max(1.0, 1 / beta))


def test_a_threshold_of_zero_reaches_the_kernel():
    """Without a GPU: the number in the source."""
    (source,) = cuda.sources(pipeline("softplus", "bf16", beta=1.0, threshold=0.0))
    assert ", 1.0f, 1.0f, 0.0f)" in source.text and "20.0f" not in source.text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div", "maximum", "minimum"])
def test_every_number_with_special_ones(kind: str):
    """Against NaN, infinities, zeros of both signs and ordinary numbers, both ways round."""
    function = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
    }[kind]
    p = Program(f"every_{kind}")
    x, y = p.load("x", TILE_ROWS), p.load("y", TILE_ROWS)
    p.store(p.op(kind, TILE_ROWS, x, y))
    p.store(p.op(kind, TILE_ROWS, y, x))
    one = p.build()
    compiled = cuda.build(one)
    x = every_number("bf16")
    for value in (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -3e38):
        y = torch.full_like(x, value)
        got = list(run_poisoned(compiled, {"x": x, "y": y}, x.shape[0]).values())
        compare(f"{kind} {value}", x, got[0].cuda(), function(x.float(), y.float()))
        compare(f"{value} {kind}", x, got[1].cuda(), function(y.float(), x.float()))

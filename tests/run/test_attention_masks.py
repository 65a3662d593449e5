"""Which attention over a mask becomes ours, what stays with Inductor and why, and that values are eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked_cases import CASES
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilestream as ts
from tilestream.graph.masked.sites import Site
from tilestream.run import masked_attention

pytestmark = pytest.mark.usefixtures("without_inductor")

BF16 = torch.bfloat16


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Site]]:
    """The attentions that became ours."""
    found: list[Site] = []
    before = masked_attention.place

    def place(site: Site) -> bool:
        made = before(site)
        found.extend([site] * made)
        return made

    monkeypatch.setattr(masked_attention, "place", place)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def compiled(run: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        made = torch.compile(run, backend="tilestream", options={"target": "reference", **options}, dynamic=False)
        got, eager = made(*inputs), run(*inputs)
        exact = run(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert got.dtype == eager.dtype and got.stride() == eager.stride()
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-9
    return got


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


@pytest.mark.parametrize("name", CASES)
def test_a_boolean_mask(name: str, placed: list[Site]) -> None:
    case = CASES[name]
    got = compiled(attended, *case.operands(), case.kept())
    assert len(placed) == 1 and placed[0].differs == case.differs
    none = ~case.kept().any(-1).expand(got.shape[:3])
    assert none.any() == (name in ("lengths, grouped queries of 80", "holes")) and not got[none].any()


@pytest.mark.parametrize("shape", [(1, 300), (200, 300), (2, 1, 1, 300), (2, 4, 200, 300)])
def test_masks_that_are_broadcast(shape: tuple[int, ...], placed: list[Site]) -> None:
    q, k, v = (torch.randn(2, 4, n, 32).to(BF16) for n in (200, 300, 300))
    compiled(attended, q, k, v, torch.rand(shape) < 0.5)
    assert len(placed) == 1


def test_an_additive_mask_stays(placed: list[Site]) -> None:
    q, k, v = (torch.randn(1, 2, 70, 32).to(BF16) for _ in range(3))
    compiled(attended, q, k, v, torch.randn(70, 70).to(BF16))
    assert not placed


def test_few_queries_are_left_to_kernels_that_split_the_keys(placed: list[Site]) -> None:
    q, k, v = (torch.randn(1, 2, n, 32).to(BF16) for n in (1, 300, 300))
    compiled(attended, q, k, v, torch.rand(1, 300) < 0.5)
    assert not placed


def test_attention_can_be_turned_off(placed: list[Site]) -> None:
    case = CASES["a window"]
    compiled(attended, *case.operands(), case.kept(), attention=False)
    assert not placed


DOCUMENTS = torch.arange(300) // 70
ENDS = torch.tensor([150, 280])
AHEAD = torch.tensor(3)
MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, q, k: q >= k,
    "a prefix": lambda b, h, q, k: (q >= k) | (k < 50),
    "windows by head": lambda b, h, q, k: (q - k).abs() < 16 * (h + 1),
    "documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k - 1]) & (k > 0),
    "lengths": lambda b, h, q, k: (k < ENDS[b]) & ~((k % 7) == 3),
    "a scalar that is read": lambda b, h, q, k: q + AHEAD >= k,
    "one of two": lambda b, h, q, k: torch.where(q < 100, q >= k, q - k < 30),
    "none": lambda b, h, q, k: q < 0,
}


def flex(keeps: Callable[..., Tensor], each: bool = False, **settings: Any) -> Callable[..., Tensor]:
    """Attention by a block mask, for each batch and head its own where ``each``."""
    sizes = (2, 4) if each else (None, None)
    made = create_block_mask(keeps, *sizes, 200, 300, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=made, **settings)  # pyright: ignore


def operands(features: int = 64, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, n, features, generator=generator).to(dtype) for n in (200, 300, 300)]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.every(6)
def test_a_block_mask(name: str, each: bool, placed: list[Site]) -> None:
    if not each and name in ("windows by head", "lengths"):
        return  # a mask for all batches and heads may not differ by them
    compiled(flex(MASKS[name], each), *operands())
    assert len(placed) == 1 and placed[0].differs == ((2, 4) if each else (1, 1))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_queries_share_keys(placed: list[Site]) -> None:
    q, k, v = operands()
    compiled(flex(MASKS["causal"], enable_gqa=True), q, k[:, :2], v[:, :2])
    assert len(placed) == 1


STAY: dict[str, tuple[Callable[[], Callable[..., Tensor]], str]] = {
    "scores": (lambda: flex(MASKS["causal"], score_mod=lambda s, b, h, q, k: s + q), "a score_mod"),
    "arithmetic of floats": (lambda: flex(lambda b, h, q, k: q * 0.5 >= k), "which is no integer arithmetic"),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", STAY)
def test_what_stays_is_told(name: str, placed: list[Site]) -> None:
    make, why = STAY[name]
    run = make()
    compiled(run, *operands())
    assert not placed
    (left,) = ts.explain(run, *operands()).analysis.exclusions
    assert why in left.reason


@pytest.mark.parametrize(("features", "dtype", "why"), [(24, BF16, "widths"), (64, torch.float32, "float32")])
def test_heads_that_do_not_fit_stay(features: int, dtype: torch.dtype, why: str, placed: list[Site]) -> None:
    case = [*operands(features, dtype), torch.rand(200, 300) < 0.5]
    compiled(attended, *case)
    assert not placed
    assert any(why in e.reason for e in ts.explain(attended, *case).analysis.exclusions)


def test_explain_says_what_may_be_ours() -> None:
    told = str(ts.explain(flex(MASKS["causal"]), *operands()))
    assert "a kernel of" in told and "timed beside it" in " ".join(told.split())


def test_a_mask_that_is_moved_stays(placed: list[Site]) -> None:
    """Padded in front, and cut off behind: what stands before is no longer the mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(bias, (1, 0))[:, :-1])

    def end(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(bias, (0, 4))[:, :-4])

    inputs = [*operands(), torch.rand(200, 300) < 0.5]
    compiled(run, *inputs)
    assert not placed
    compiled(end, *inputs)
    assert len(placed) == 1

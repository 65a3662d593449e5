"""Masks of attention that PyTorch's fused kernels do not take: dropped, or copied once, in Dynamo's graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tilestream.graph import capture as capturing
from tilestream.graph.attention_masks import SDPA, give_ranks, settle_masks
from tilestream.options import Options
from tilestream.plan.analyse import analyse

BATCH, HEADS, TOKENS, FEATURES = 2, 4, 24, 16
LOG2_E = 1.44269504
Run = Callable[..., Tensor]


def operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(BATCH, HEADS, TOKENS, FEATURES, generator=generator) for _ in range(3)]
    return [x.to(dtype) for x in made]


def settled(run: Run, *inputs: Tensor) -> tuple[fx.GraphModule, int]:
    """Dynamo's graph of ``run``, as if on a GPU, after ``settle_masks``; of how many attentions it changed the mask."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(run, backend=keep, dynamic=False)(*inputs)
    (gm,) = found
    with FakeTensorMode():
        for node in gm.graph.nodes:
            x = node.meta.get("example_value")
            if isinstance(x, Tensor):
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                node.meta["example_value"] = fake.requires_grad_(x.requires_grad)
    return gm, settle_masks(gm)


def attentions(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is SDPA]


def called(gm: fx.GraphModule, run: Run, inputs: Sequence[Tensor]) -> Any:
    """Dynamo has arguments in the order in which they are used."""
    by_name = {f"L_{name}_": x for name, x in zip(inspect.signature(run).parameters, inputs, strict=True)}
    return gm(*(by_name[str(n.target)] for n in gm.graph.find_nodes(op="placeholder")))


def check_values(gm: fx.GraphModule, run: Run, *inputs: Tensor) -> None:
    """The changed graph means what the user's function does, exactly in float64."""
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": torch.device("cpu")}
        if node.target is torch.scalar_tensor:
            node.kwargs = node.kwargs | {"dtype": torch.float64}
    gm.recompile()
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    (got,) = called(gm, run, wide)
    torch.testing.assert_close(got, run(*wide), rtol=1e-12, atol=1e-12)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers makes a mask where no padding is given."""
    rows = torch.arange(TOKENS, device=q.device)[None, None, :, None] + 0
    mask = (rows >= 0).expand(BATCH, -1, TOKENS, TOKENS)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.3)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(TOKENS, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, (at[:, None] >= at[None, :])[None, None])


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers does where positions may begin anew: those that the model makes itself do not."""
    at = torch.arange(TOKENS, device=q.device)
    positions = at[None]
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1).expand(BATCH, -1)
    batch, row, key = torch.arange(BATCH)[:, None, None, None], at[None, None, :, None], at[None, None, None, :]
    kept = (row >= key) & (sequence[batch, row] == sequence[batch, key])
    return F.scaled_dot_product_attention(q, k, v, kept)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(TOKENS, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, at[:, None] - at[None, :] < 5)


@pytest.mark.parametrize(("run", "is_causal"), [(expanded, False), (causal, True), (packed, True)])
def test_a_mask_that_no_argument_decides_is_dropped(run: Run, is_causal: bool) -> None:
    gm, made = settled(run, *operands())
    (node,) = attentions(gm)
    assert made == 1 and node.kwargs["attn_mask"] is None and bool(node.kwargs.get("is_causal")) == is_causal
    assert not any(n.target is torch.arange for n in gm.graph.nodes)
    check_values(gm, run, *operands())


@pytest.mark.parametrize("attention", [True, False])
def test_explain_finds_what_compiling_does(attention: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option masks stay as the model has them, in both."""
    settled: list[fx.GraphModule] = []
    monkeypatch.setattr(capturing, "settle_masks", settled.append)
    analyse(causal, operands(), options=Options(device="h200", attention=attention))
    assert len(settled) == attention


def test_another_one_stays() -> None:
    gm, made = settled(window, *operands())
    assert not made and isinstance(attentions(gm)[0].args[3], fx.Node)


def by_query(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Two layers, with a mask that is the same for all keys; some rows keep none."""
    mask = kept[None, None, :, None].expand(BATCH, 1, TOKENS, TOKENS)
    q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_rows_of_a_boolean_mask_are_copied_once() -> None:
    kept = torch.arange(TOKENS) % 3 > 0
    gm, made = settled(by_query, *operands(), kept)
    first, second = attentions(gm)
    mask: Any = first.kwargs["attn_mask"]
    assert made == 2 and mask is second.kwargs["attn_mask"] and mask.target == "contiguous"
    (added,) = mask.all_input_nodes
    assert added.target is torch.where and [n.kwargs["dtype"] for n in added.args[1:]] == [torch.bfloat16] * 2
    check_values(gm, by_query, *operands(), kept)
    assert not called(gm, by_query, [*(x.double() for x in operands()), kept])[0][:, :, ::3].any()


@pytest.mark.parametrize("kind", ["boolean", "bias"])
def test_in_training_empty_rows_have_gradients(kind: str) -> None:
    """The kernel is given no row of minus infinity; values and gradients are as before."""
    run, mask = by_query, torch.arange(TOKENS) % 3 > 0
    if kind == "bias":
        run, mask = biased, torch.randn(TOKENS, TOKENS, HEADS)
        mask[3], mask[5, :9] = float("-inf"), float("-inf")
    narrow = mask.bfloat16() if kind == "bias" else mask
    gm, made = settled(run, *(x.requires_grad_() for x in operands()), narrow)
    assert made == len(attentions(gm)) and all(n.kwargs["attn_mask"].target is torch.clamp for n in attentions(gm))
    check_values(gm, run, *operands(), mask)
    wide = [x.double().requires_grad_() for x in operands()]
    mine = torch.autograd.grad(called(gm, run, [*wide, mask.double() if kind == "bias" else mask])[0].sum(), wide)
    theirs = torch.autograd.grad(run(*wide, mask.double() if kind == "bias" else mask).sum(), wide)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Fused(torch.autograd.Function):
    """As a fused kernel: scores times log2(e) in float32, of which it keeps the logarithm of a row's sum."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = (q @ k.mT * scale + mask).float() * LOG2_E
        most = scores.amax(-1, keepdim=True)
        weights = (scores - most).exp2()
        total = weights.sum(-1, keepdim=True)
        ctx.save_for_backward(q, k, v, scores, most + total.log2())
        ctx.scale = scale
        return weights / total @ v

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, scores, kept = ctx.saved_tensors
        (out,) = grads
        weights = (scores - kept).exp2()
        of_weights = out @ v.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * ctx.scale
        return of_scores @ k, of_scores.mT @ q, weights.mT @ out, None, None


def fused(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float = 1.0) -> Tensor:
    return Fused.apply(q, k, v, attn_mask, scale)  # pyright: ignore


@pytest.mark.parametrize("large", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -2e9])
def test_in_training_rows_of_large_numbers_are_means_for_a_fused_kernel(large: float) -> None:
    """Its weights are found from the logarithm of a row's sum, which large numbers absorb."""
    bias = torch.randn(TOKENS, TOKENS, HEADS)
    bias[3], bias[4], bias[5, :9] = float("-inf"), large, float("-inf")
    bias[6, :5], bias[6, 5:] = float("-inf"), large
    gm, _ = settled(biased, *(x.requires_grad_() for x in operands()), bias.bfloat16())
    (node,) = attentions(gm)
    node.target = fused
    gm.recompile()
    rows = torch.arange(TOKENS)[:, None]
    empty, mean = rows == 3, (rows == 4) | (rows == 6)
    given, (q, k, v) = ([x.to(dtype).requires_grad_() for x in operands()] for dtype in (torch.float32, torch.float64))
    # Written out: PyTorch's kernel for CPUs is a fused one as well.
    absorbing = bias.double().where(bias != large, -1e38)  # in float64 too
    weights = (q @ k.mT + absorbing.permute(2, 0, 1).masked_fill(empty, 0)).softmax(-1)
    got, want = called(gm, biased, [*given, bias.float()])[0], (weights @ v).masked_fill(empty, 0)
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    factor = torch.randn(want.shape)
    mine = torch.autograd.grad((got * factor).sum(), given)
    values = torch.autograd.grad((want * factor).sum(), v, retain_graph=True)
    others = torch.autograd.grad((want * factor).masked_fill(mean, 0).sum(), (q, k))  # a mean depends on neither
    for one, other in zip(mine, [*others, *values], strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)


def by_query_then_written(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    kept = kept.clone()
    mask = kept[None, None, :, None].expand(BATCH, 1, TOKENS, TOKENS)
    kept[5:] = False
    q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    kept.logical_not_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_mask_that_is_written_between_layers_is_copied_for_each() -> None:
    kept = torch.arange(TOKENS) % 3 > 0
    gm, made = settled(by_query_then_written, *operands(), kept)
    first, second = attentions(gm)
    assert made == 2 and first.kwargs["attn_mask"] is not second.kwargs["attn_mask"]
    check_values(gm, by_query_then_written, *operands(), kept)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As T5 has its bias: heads last in memory."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.permute(2, 0, 1)[None], scale=1.0)


def test_rows_of_a_bias_are_copied() -> None:
    """Nothing in them overflows, and rows without a pair are what they were: zero, or the mean."""
    bias = torch.randn(TOKENS, TOKENS, HEADS)
    bias[3], bias[4], bias[5, :9] = float("-inf"), torch.finfo(torch.bfloat16).min, float("-inf")
    gm, made = settled(biased, *operands(), bias.bfloat16())
    mask: Any = attentions(gm)[0].kwargs["attn_mask"]
    assert made == 1 and mask.target == "contiguous"
    check_values(gm, biased, *operands(), bias)
    (rows,) = [n for n in gm.graph.nodes if n.target is torch.clamp]
    least = rows.kwargs["min"]
    assert torch.isfinite(torch.tensor(least).bfloat16() * 1.45)
    assert float(torch.tensor(least).bfloat16()) == least, "rounded or not, it is the same"


def test_rows_of_a_bias_of_half_precision() -> None:
    """The least of its numbers absorbs no score, and nothing lower can be made of it."""
    bias = torch.randn(TOKENS, TOKENS, HEADS).half()
    bias[3], bias[4], bias[5, :9] = float("-inf"), torch.finfo(torch.float16).min, float("-inf")
    given = [x.requires_grad_() for x in operands(torch.float16)]
    gm, made = settled(biased, *given, bias)
    assert made == 1
    # As on a GPU, where it is multiplied in float32.
    want = biased(*(x.float() for x in given), bias.float()).half()
    torch.testing.assert_close(called(gm, biased, [*given, bias])[0], want, rtol=1e-2, atol=1e-2)


def test_a_mask_that_fused_kernels_take_stays() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].expand(-1, -1, TOKENS, -1))

    assert settled(run, *operands(), torch.rand(BATCH, TOKENS) < 0.5)[1] == 0


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device)
    mask[0].fill_(False)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def drawn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.rand(TOKENS, TOKENS, device=q.device) >= 0.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("run", [written, drawn])
def test_what_is_written_or_drawn_is_not_known(run: Run) -> None:
    assert settled(run, *operands())[1] == 0


def test_on_a_cpu_nothing_changes() -> None:
    gm, _ = settled(window, *operands())
    for node in gm.graph.nodes:
        node.meta["example_value"] = torch.empty(0)
    assert settle_masks(gm) == 0


@pytest.mark.parametrize("shape", [(6, 5, 8), (2, 3, 4, 5, 8), (1, 2, 3, 4, 5, 8), (0, 5, 8)])
def test_other_ranks_become_four(shape: tuple[int, ...]) -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(shape) for _ in range(3)]
    gm, _ = settled(attended, *inputs)
    assert give_ranks(gm) == 1
    (node,) = attentions(gm)
    assert all(n.args[1] == (6, 1, 5, 8) for n in node.args) if shape == (6, 5, 8) else node.kwargs["is_causal"]  # pyright: ignore
    check_values(gm, attended, *inputs)


def test_ranks_that_stay() -> None:
    """Rank 4, no heads and no sequences, a mask, keys of other sequences, and what is on a CPU."""

    def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    rank4, rank2, rank5 = ([torch.randn(s)] * 3 for s in ((2, 3, 5, 8), (5, 8), (2, 2, 3, 5, 8)))
    shared = [torch.randn(2, 3, 4, 5, 8), *[torch.randn(1, 3, 4, 5, 8)] * 2]
    for inputs in (rank4, rank2, [*rank5, torch.ones(5, 5, dtype=torch.bool)], shared):
        gm, _ = settled(attended, *inputs)
        assert give_ranks(gm) == 0
    gm, _ = settled(attended, *rank5)
    for node in gm.graph.nodes:
        node.meta.pop("example_value", None)
    assert give_ranks(gm) == 0

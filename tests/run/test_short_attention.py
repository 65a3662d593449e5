"""Attention over few keys as our kernel: which attentions of graphs and of whole models may be ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from alternatives import TARGET, are_timed, replaced
from eager_regions import trace
from torch import Tensor, nn

from tilestream.graph.capture import capture
from tilestream.graph.rewrites.shared_keys import is_attention
from tilestream.graph.short_attention import SHORT
from tilestream.graph.written_attention import terms, written_at
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run.attention import attention_trial
from tilestream.run.short_attention import SHORT_ATTENTION, fits
from tilestream.run.written_attention import OURS, question


def operands(tokens: int = 9, features: int = 16, mask: tuple[int, ...] | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    parts = torch.randn(2, tokens, 3, 3, features).bfloat16().permute(2, 0, 3, 1, 4)
    return [*parts.unbind(0), *([torch.randn(mask).bfloat16()] if mask else [])]


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3).transpose(1, 2)


@pytest.mark.parametrize("mask", [None, (2, 1, 9, 9), (1, 3, 9, 9)])
def test_it_takes_a_librarys_place_where_it_is_faster(
    mask: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = operands(mask=mask)
    want = attended(*inputs)
    for ours, taken in ((5.0, 1), (20.0, 0)):
        graph = trace(attended, inputs)
        assert replaced(monkeypatch, graph, SHORT_ATTENTION, lambda *_, ours=ours: [ours, 10.0]) == taken
        assert sum(n.target is SHORT for n in graph.graph.nodes) == taken
        torch.testing.assert_close(graph(*inputs)[0], want, atol=0.01, rtol=0.05)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("run", "inputs"),
    [
        (causal, operands()),
        (attended, operands(257)),
        (attended, operands(129, 128)),
        (attended, operands(230, 16, (1, 3, 230, 230))),
        (attended, operands(features=24)),
        (attended, [x.float() for x in operands()]),
    ],
)
def test_what_has_no_kernel_stays(run: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    (node,) = [n for n in trace(run, inputs).graph.nodes if is_attention(n)]
    assert not fits(node)


def test_both_ways_are_called_on_values_like_the_operands() -> None:
    (node,) = [n for n in trace(attended, operands(mask=(2, 1, 9, 9))).graph.nodes if is_attention(n)]
    trial = attention_trial(node, SHORT_ATTENTION.ours)
    values = trial.make()
    assert trial.plain is not None
    (right,) = trial.plain(*[v.double() for v in values])
    for candidate in (Candidate("ours", None, None, operator="ours"), Candidate(FALLBACK, None, None)):
        (made,) = trial.call(candidate, values)()
        torch.testing.assert_close(made.double(), right, atol=0.05, rtol=0.05)


class Padded(nn.Module):
    """An encoder of transformers, of tokens and which of them are there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, there: Tensor) -> Tensor:
        return self.model(input_ids=tokens, attention_mask=there).last_hidden_state


def of_timm(name: str) -> tuple[nn.Module, list[Tensor]]:
    timm = pytest.importorskip("timm", reason="timm is not installed (pip install 'tilestream[models]')")
    return timm.create_model(name).bfloat16(), [torch.randn(1, 3, 224, 224).bfloat16()]


def of_transformers(name: str) -> tuple[nn.Module, list[Tensor]]:
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    model = getattr(found, f"{name}Model")(getattr(found, f"{name}Config")(num_hidden_layers=2))
    there = torch.ones(2, 128, dtype=torch.long)
    there[0, 100:] = 0
    return Padded(model.bfloat16()), [torch.randint(1000, (2, 128)), there]


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, list[Tensor]]], list[list[int]] | int]] = {
    "Swin-T": (
        lambda: of_timm("swin_tiny_patch4_window7_224"),
        [[1], [1, 64], [1], [1, 16], *[[1], [1, 4]] * 3, [1], [1]],
    ),
    "ViT-tiny": (lambda: of_timm("vit_tiny_patch16_224"), 12),
    "BERT": (lambda: of_transformers("Bert"), 2),
    "MPNet": (lambda: of_transformers("MPNet"), [[1, 2]] * 2),
}
"""A model, and of attentions that it writes out the periods of what is added, or how many it leaves to a library."""


@pytest.mark.parametrize("name", MODELS)
def test_attentions_of_whole_models_may_be_ours(name: str) -> None:
    make, expected = MODELS[name]
    model, inputs = make()
    with torch.no_grad():
        (graph,) = capture(model.eval(), inputs).graphs
    written = [site for site in map(written_at, graph.graph.nodes) if site is not None]
    if isinstance(expected, int):
        assert not written and sum(is_attention(n) and fits(n) for n in graph.graph.nodes) == expected
        return
    assert [[shape[0] for *_, shape in terms(site)[0]] for site in written] == expected  # pyright: ignore
    for site in written:
        (ours,) = [c for c in question(site, TARGET).propose() if c.strategy == OURS]
        assert ours.predicted_us is not None and 2 < ours.predicted_us < 10


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, (2, 1, 9, 9), (1, 3, 9, 9)])
def test_both_compute_the_same(mask: tuple[int, ...] | None) -> None:
    inputs = [x.cuda() for x in operands(mask=mask)]
    (node,) = [n for n in trace(attended, inputs).graph.nodes if is_attention(n)]
    assert are_timed(node, SHORT_ATTENTION)

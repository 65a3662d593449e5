"""Attention over the pairs of a mask on the GPU: against float64, the same bits every time, in compiled graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from masked_cases import BANDS, BIGBIRD, CASES, WINDOW, Case, judged
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tilestream.cuda.masked_attention import attention
from tilestream.kernels.parts.pairs import EVERY, band
from tilestream.run import masked_attention
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture
from tilestream.run.whole import Whole

pytestmark = pytest.mark.gpu

EVERY_WIDTH = {
    f"a window, heads of {n}": Case(WINDOW, (2, 3, 1, 400, 450, n), dtype=dtype)
    for n in (16, 48, 64, 96, 128)
    for dtype in (torch.bfloat16, torch.float16)
}


EVERY_BAND = BANDS | {
    f"causal, heads of {n}": Case(band(EVERY, 0), (2, 3, 1, 400, 400, n), dtype=dtype, listed=False)
    for n in (16, 48, 64, 96, 128)
    for dtype in (torch.bfloat16, torch.float16)
}
EVERY_BAND |= {
    f"causal, many heads of {n}": Case(band(EVERY, 0), (8, 36, 12, 200, 200, n), listed=False) for n in (64, 128)
}
ALL = CASES | EVERY_WIDTH | EVERY_BAND


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_values(case: Case) -> None:
    query, key, value = case.operands("cuda")
    read = [t.cuda() for t in case.read]
    blocks = case.blocks("cuda")

    def run() -> Tensor:
        out = torch.full_like(query, float("nan"))
        return attention(query, key, value, case.mask, read, blocks, case.differs, case.sizes[-1] ** -0.5, out)

    got = run()
    assert judged(got, case)
    assert torch.equal(got, run())
    graph = capture(run)
    assert isinstance(graph.outputs, Tensor)
    graph.outputs.fill_(float("nan"))
    graph.replay()
    assert torch.equal(graph.outputs, got)


def test_a_mask_changes_between_replays() -> None:
    case = CASES["holes"]
    query, key, value = case.operands("cuda")
    mask = case.read[0].cuda()
    out = torch.empty_like(query)
    graph = capture(lambda: attention(query, key, value, case.mask, [mask], None, (2, 1), 32**-0.5, out))
    other = replace(case, read=(~case.read[0],))
    mask.copy_(other.read[0])
    out.fill_(float("nan"))
    graph.replay()
    assert judged(out, other)


@pytest.mark.parametrize("forced", [True, False])
def test_in_a_compiled_graph(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """BigBird's blocks: what the graph as a whole is timed with, and, unless ours is taken untimed, without."""
    at = torch.arange(16)
    kept = ((at[:, None] - at).abs() <= 1) | (at == 0) | (at == 0)[:, None]
    case = Case(BIGBIRD, (2, 6, 6, 1024, 1024, 64), (kept,))
    placed, before, blocks = [], masked_attention.place, kept.cuda()
    monkeypatch.setattr(masked_attention, "place", lambda site: placed.append(site) or before(site))
    if forced:
        monkeypatch.setattr(Whole, "choose", lambda _, streamed, __, compiled, *rest: compiled(streamed))
    listed = create_block_mask(lambda b, h, q, k: blocks[q // 64, k // 64], None, None, 1024, 1024)

    def run(q: Tensor, k: Tensor, v: Tensor) -> object:
        return flex_attention(q, k, v, block_mask=listed)

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(run, backend=tilestream, options={"cache": False})(*case.operands("cuda"))
    assert placed and judged(got, case)

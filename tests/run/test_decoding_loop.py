"""The loop of ``generate``: the tokens of transformers' own, its ends, its cache; what it leaves to the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_decode import small
from torch import Tensor

import tilestream
from tilestream.errors import InputError
from tilestream.run.generate import Tokens

PROMPT = torch.tensor([[3, 14, 15, 92, 65], [35, 89, 79, 32, 38]])
PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def both(module: Any, ids: Tensor = PROMPT, **given: Any) -> list[Tensor]:
    """Tokens by transformers' loop and by ours, neither compiled, of the same random numbers."""
    made = []
    for loop in ({}, {"custom_generate": tilestream.decoding_loop}):
        torch.manual_seed(1)
        given = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 20, **given}
        made.append(module.generate(ids, **given, **loop))
    return made


class AtFourteen:
    """A criterion of the user's own: a sequence ends with its 14th token."""

    def __call__(self, ids: Tensor, scores: Any) -> Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] >= 14)


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False},
        {"do_sample": False, "attention_mask": PADDED},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 10, "temperature": 0.7},
        {"do_sample": True, "attention_mask": PADDED, "eos_token_id": [7, 9, 30]},
        {"do_sample": False, "max_new_tokens": 1},
        {"do_sample": False, "max_new_tokens": 2},
        {"do_sample": False, "stopping_criteria": [AtFourteen()]},
    ],
)
def test_tokens_are_those_of_transformers(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    want, got = both(small("Qwen3"), **given)
    assert torch.equal(got, want)
    assert "transformers' own loop" not in caplog.text


@torch.no_grad()
def test_sequences_end() -> None:
    """All of them, at once or one after the other: as many tokens as transformers has, and padding behind an end."""
    module = small("Qwen3")
    (first, _), lengths = both(module, do_sample=False), set()
    for ends in ([int(first[0, 8])], [int(first[0, 9]), int(first[1, 6])], [int(first[0, 6]), int(first[1, 12])]):
        want, got = both(module, do_sample=False, eos_token_id=ends)
        assert torch.equal(got, want)
        lengths.add(got.shape[1])
    assert min(lengths) < 25


@torch.no_grad()
def test_a_cache_of_the_users_own_goes_on_where_it_was_left() -> None:
    module = small("Qwen3")
    transformers = pytest.importorskip("transformers")
    (first, _) = both(module, do_sample=False)
    caches = [transformers.StaticCache(config=module.config, max_cache_len=48) for _ in range(2)]
    made = []
    for cache, loop in zip(caches, ({}, {"custom_generate": tilestream.decoding_loop}), strict=True):
        given = {"do_sample": False, "disable_compile": True, "past_key_values": cache, "max_new_tokens": 8, **loop}
        ids = module.generate(PROMPT, eos_token_id=[int(first[0, 8]), int(first[1, 8])], **given)
        made.append(module.generate(torch.cat([ids, PROMPT], 1), **given))
    assert torch.equal(*made)
    assert len({int(cache.get_seq_length()) for cache in caches}) == 1


@torch.no_grad()
def test_a_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestream.graph.decode import STEP
    from tilestream.run import inductor
    from tilestream.run.backend import tilestream as backend

    module, graphs = small("Qwen3"), list[Any]()
    from transformers import CompileConfig  # pyright: ignore[reportMissingImports]

    inner = inductor.compile_inner
    monkeypatch.setattr(inductor, "compile_inner", lambda gm, *rest: (graphs.append(gm), inner(gm, *rest))[1])
    torch._dynamo.reset()
    config = CompileConfig(backend=backend, mode=None, options={"target": "reference"})  # pyright: ignore
    got = module.generate(
        PROMPT, do_sample=False, max_new_tokens=6, cache_implementation="static", compile_config=config,
        custom_generate=tilestream.decoding_loop,
    )  # fmt: skip
    assert [bool(g.graph.find_nodes(op="call_function", target=STEP)) for g in graphs] == [True]
    want = module(got[:, :-1]).logits[:, 4:].float()
    chosen = want.gather(2, got[:, 5:, None])[..., 0]
    assert (want.amax(-1) - chosen < 0.05 * want.abs().amax(-1)).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"return_dict_in_generate": True}, "more than tokens is returned"),
        ({"cache_implementation": "dynamic"}, "the cache is not static"),
    ],
)
def test_what_is_left_to_transformers(given: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    want, got = both(small("Qwen3"), do_sample=False, **given)
    if "return_dict_in_generate" in given:
        want, got = want.sequences, got.sequences  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(got, want)
    assert why in caplog.text


@torch.no_grad()
def test_what_is_refused() -> None:
    module = small("Qwen3")
    transformers = pytest.importorskip("transformers")
    with pytest.raises(InputError, match="no beam_search"):
        module.generate(PROMPT, num_beams=2, custom_generate=tilestream.decoding_loop)
    cache = transformers.StaticCache(config=module.config, max_cache_len=8)
    with pytest.raises(InputError, match="10 tokens want a cache of 9 positions, not 8"):
        module.generate(
            PROMPT, max_new_tokens=5, do_sample=False, past_key_values=cache, custom_generate=tilestream.decoding_loop
        )


def test_tokens_and_their_ends() -> None:
    criteria = [SimpleNamespace(max_length=9), SimpleNamespace(eos_token_id=torch.tensor([7, 8]))]
    tokens = Tokens(PROMPT, 9, 12, PADDED, criteria)
    assert tokens.mask is not None and tokens.places is not None and tokens.ends
    assert tokens.mask.tolist() == [[0, 0] + [1] * 10, [1] * 12]
    for chosen in ([1, 8], [7, 2], [3, 4]):
        tokens.put(torch.tensor(chosen))
        tokens.count_one()
    assert tokens.made[:, 5:].tolist() == [[1, 7, 0], [8, 0, 0]] and not tokens.unfinished.any()
    assert tokens.last.tolist() == [[0], [0]] and tokens.places.tolist() == [[5], [7]]
    assert tokens.drop() == 1 and tokens.made.shape == (2, 7)


def test_tokens_that_never_end() -> None:
    tokens = Tokens(PROMPT, 7, 12, torch.ones_like(PADDED), [SimpleNamespace(max_length=7)])
    assert tokens.mask is None and tokens.places is None and not tokens.ends
    tokens.put(torch.tensor([4, 5]))
    tokens.count_one()
    assert tokens.made[:, 5:].tolist() == [[4], [5]] and tokens.drop() == 0

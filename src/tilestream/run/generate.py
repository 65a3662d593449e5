"""The loop of transformers' ``generate``: a step is compiled, captured and replayed; the host does not wait for it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilestream.announce import announce, announce_failure
from tilestream.errors import InputError

LATE = 2
"""The host knows of the token before the last one whether all have ended: it waits for what is done already."""


class Tokens:
    """A prompt and the tokens behind it.

    Args:
        prompt: [batch, tokens]. length: of all tokens. positions: of the cache.
        mask: [batch, tokens], 0 where the prompt is padded; or None.
        criteria: of transformers: those with ``eos_token_id`` end a sequence; those with neither it nor ``max_length``
            are ``others``, which are asked for each token. pad: a token, 0 unless told.

    Attributes:
        count: tokens that there are. made: they, [batch, count]. last: the last one of each, [batch, 1].
        mask: [batch, positions], and places: [batch, 1], of the next token; None where no prompt is padded.
        unfinished: [batch], the sequences that have not ended.
    """

    def __init__(
        self, prompt: Tensor, length: int, positions: int, mask: Tensor | None, criteria: Any, pad: Tensor | None = None
    ) -> None:
        batch, self.count = prompt.shape
        self.prompt = self.count
        self.pad = prompt.new_zeros(()) if pad is None else pad.to(prompt.device)
        self.ids = prompt.new_zeros(batch, length)
        self.ids[:, : self.count] = prompt
        self.last, self.at = prompt.new_zeros(batch, 1), torch.tensor([self.count], device=prompt.device)
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=prompt.device)
        ends = [c.eos_token_id.to(prompt.device).flatten() for c in criteria if hasattr(c, "eos_token_id")]
        self.eos = torch.cat(ends) if ends else None
        self.others = [c for c in criteria if not hasattr(c, "eos_token_id") and not hasattr(c, "max_length")]
        self.told = deque[tuple[Tensor, torch.cuda.Event]]()  # what the GPU will have told of ``unfinished``
        self.mask = self.places = None
        if mask is not None and not mask.all():
            self.mask = mask.new_ones(batch, positions)
            self.mask[:, : mask.shape[1]] = mask
            self.places = mask.sum(-1, keepdim=True) - 1  # one less than the first token's, which ``put`` adds

    @property
    def made(self) -> Tensor:
        return self.ids[:, : self.count]

    @property
    def ends(self) -> bool:
        """Whether a sequence may end before all are full."""
        return self.eos is not None or bool(self.others)

    def put(self, chosen: Tensor) -> None:
        """Add a token of each sequence, [batch]; padding behind one's end. Nothing here waits for the GPU."""
        if self.eos is not None:
            chosen = torch.where(self.unfinished, chosen, self.pad)
        self.ids.index_copy_(1, self.at, chosen[:, None])
        self.last.copy_(chosen[:, None])
        self.at.add_(1)
        if self.eos is not None:
            self.unfinished.logical_and_((chosen[:, None] != self.eos).all(1))  # ``isin`` of many waits for the GPU
        if self.places is not None:
            self.places.add_(1)

    def count_one(self) -> None:
        """Once ``put``, or a replay of it, has added tokens."""
        self.count += 1
        for criterion in self.others:
            self.unfinished.logical_and_(~torch.as_tensor(criterion(self.made, None), device=self.ids.device))

    def ended(self) -> bool:
        """Whether all sequences have ended, as the host knows: of the GPU, what it was ``LATE - 1`` tokens ago."""
        if not self.ends:
            return False
        going = self.unfinished.any()
        if not going.is_cuda or self.others:
            return not going
        told, event = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        told.copy_(going, non_blocking=True)
        event.record()
        self.told.append((told, event))
        if len(self.told) < LATE:
            return False
        told, event = self.told.popleft()
        event.synchronize()
        return not told

    def drop(self) -> int:
        """Leave tokens behind the end of all sequences away; how many were."""
        if self.eos is None or self.others or self.count == self.prompt:
            return 0
        new = torch.isin(self.made[:, self.prompt :], self.eos)
        lasts = torch.where(new.any(1), new.int().argmax(1) + 1, new.shape[1])
        dropped = new.shape[1] - int(lasts.max())
        self.count -= dropped
        return dropped


CACHES = ("past_key_values", "cache")
"""What transformers calls the cache, before and after version 5.24."""
TAKEN = {"attention_mask", "use_cache", "position_ids", "logits_to_keep", "cache_position", *CACHES}
"""Arguments of a model that the loop makes for each token, or that say nothing about it."""
TRIES = 2
"""Of capturing a step: the first one may find that it has to be compiled."""


def decoding_loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Tokens [batch, length], greedy or sampled: ``model.generate(..., custom_generate=tilestream.decoding_loop)``.

    ``generate`` of transformers calls it with its own arguments. The step of a token is compiled by tilestream
    (unless ``compile_config`` says otherwise), captured as a CUDA graph once a call, and replayed. What is chosen stays
    on the GPU, and that all sequences have ended is known a token late: what was made too much is dropped, from the
    cache too. What it cannot do is announced, and done by transformers' own loop.

    Raises:
        InputError: tokens are to be searched for by beams and the like, or the cache that was given is too small.
    """
    if (mode := generation_config.get_generation_mode().value) not in ("greedy_search", "sample"):
        raise InputError(f"the decoding loop does no {mode}", "leave custom_generate away")
    name = next((n for n in CACHES if model_kwargs.get(n) is not None), CACHES[0])
    cache, length = model_kwargs.get(name), stopping_criteria.max_length
    why = _refusal(model, cache, generation_config, length, model_kwargs, streamer is not None or synced_gpus)
    if why:
        announce(f"tokens are made by transformers' own loop: {why}")
        more = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **more)
    positions = cache.layers[0].max_cache_len  # pyright: ignore[reportOptionalMemberAccess]
    if positions < length - 1:
        raise InputError(f"{length} tokens want a cache of {length - 1} positions, not {positions}", "a longer one")
    first = model._prefill(input_ids, generation_config, dict(model_kwargs)).logits[:, -1]
    mask, pad = model_kwargs.get("attention_mask"), generation_config._pad_token_tensor
    tokens = Tokens(input_ids, length, positions, mask, stopping_criteria, pad)
    step, is_captured = _step(model, generation_config)
    greedy = not generation_config.do_sample

    def chosen(logits: Tensor) -> Tensor:
        if greedy and not logits_processor:
            return logits.argmax(-1)
        scores = logits_processor(tokens.made, logits.to(torch.float32))
        return scores.argmax(-1) if greedy else torch.multinomial(torch.softmax(scores, -1), 1)[:, 0]

    # Whatever reads the tokens so far reads more of them each time, so it is not captured.
    whole = greedy and not logits_processor and not tokens.others

    def run() -> Tensor:
        given = {"attention_mask": tokens.mask, "position_ids": tokens.places, name: cache}
        logits = step(input_ids=tokens.last, use_cache=True, return_dict=True, **given).logits[:, -1]
        if whole:
            tokens.put(chosen(logits))
        return logits

    tokens.put(chosen(first))
    tokens.count_one()
    replay = None
    tries = TRIES if is_captured else 0
    while tokens.count < length and not tokens.ended():
        if replay is None and tries:
            tries -= 1
            replay = _captured(run, is_last=not tries)
        logits = (replay or run)()
        if not whole:
            tokens.put(chosen(logits))
        tokens.count_one()
    for layer in cache.layers if (dropped := tokens.drop()) else ():  # pyright: ignore[reportOptionalMemberAccess]
        layer.cumulative_length.sub_(dropped)
    return tokens.made


def _refusal(model: Any, cache: Any, config: Any, length: int | None, kwargs: dict[str, Any], follows: bool) -> str:
    """Why transformers' loop must do it; empty if ours can."""
    layers = getattr(cache, "layers", [None])
    if not all(type(layer).__name__ == "StaticLayer" for layer in layers):
        return "the cache is not static; cache_implementation='static' makes it so"
    if config.return_dict_in_generate:
        return "more than tokens is returned (return_dict_in_generate)"
    if follows:
        return "a streamer, or another GPU, follows each token"
    if length is None:
        return "the number of tokens is not bounded"
    if unknown := [name for name, given in kwargs.items() if name not in TAKEN and given is not None]:
        return f"the model is given {', '.join(unknown)}"
    return "" if hasattr(model, "_prefill") else "transformers is older than 5"


def _step(model: Any, config: Any) -> tuple[Callable[..., Any], bool]:
    """The model's call for a token, compiled; whether it may be captured."""
    from transformers import CompileConfig  # pyright: ignore[reportMissingImports]

    from tilestream.run.backend import tilestream

    given = config.compile_config or CompileConfig(backend=tilestream, mode=None)  # pyright: ignore[reportArgumentType]
    captures = given.mode is None and not (given.options or {}).get("triton.cudagraphs")
    step = model if config.disable_compile else model.get_compiled_call(given)
    return step, captures and not config.disable_compile and model.device.type == "cuda"


def _captured(run: Callable[[], Tensor], is_last: bool) -> Callable[[], Tensor] | None:
    """``run`` as a CUDA graph, whose result lies in one place; None if it has to be compiled first, or cannot be one.

    ``torch.cuda.graph`` would empty the allocator's caches: milliseconds of a call whose tokens take 24.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream), torch.compiler.set_stance("fail_on_recompile"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # of a first try
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
    except RuntimeError as failure:
        if is_last:
            announce_failure("a step is launched anew for each token: it was not captured", failure)
        return None

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay

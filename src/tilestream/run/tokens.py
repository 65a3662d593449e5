"""The tokens that a loop makes, each where the last one was, so that a step on them may be captured and replayed."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

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

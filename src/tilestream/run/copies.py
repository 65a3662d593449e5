"""Copies of weights that lie as no kernel reads them, made once: for who says that weights do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Copy:
    """``tensor`` is a copy of a weight in ``memory`` when torch had counted ``version`` changes of it in place."""

    tensor: torch.Tensor
    memory: StorageWeakRef
    version: int

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether it still holds what ``weight`` holds, as far as torch can tell: the memory was not freed, which
        another tensor may have now, and nothing was written under torch's eyes, as ``load_state_dict`` does."""
        return not self.memory.expired() and self.version == _version(weight)


class Copies:
    """The copies of a region's weights, by operand and address."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Copy] = {}

    def of(self, name: str, weight: torch.Tensor, make: Callable[[], torch.Tensor]) -> Copy | None:
        """The copy of ``weight``, made by ``make`` where there is none or it is old; None while a CUDA graph is
        captured, whose memory is its own: the copy then has to be part of the graph."""
        key = (name, weight.data_ptr())
        found = self._kept.get(key)
        if found is not None and found.is_of(weight):
            return found
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        self._kept = {k: c for k, c in self._kept.items() if not c.memory.expired()}
        made = self._kept[key] = Copy(make(), StorageWeakRef(weight.untyped_storage()), _version(weight))
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()  # other streams may read it from now on
        return made


def _version(weight: torch.Tensor) -> int:
    """Changes in place that torch has counted; inference tensors have no count."""
    return 0 if weight.is_inference() else weight._version

"""Sorted lists of edges, kept from call to call where it is sure that a list is the same.

Sure is what lies in the same memory, seen alike, after as many changes in place as torch had counted before. Compiled
code hands operators tensors whose count begins anew, so each call notes the counts of its arguments. What writes past
torch's count (``.data``, a replayed CUDA graph, another library) is not seen, so the user has to ask for it
(``keep_lists``). While a CUDA graph is captured nothing is taken that a replay might find changed: only buffers that
the user says are constant (``constant_weights``), which are kept whether or not the others are.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tilestream.options import Options

MOST = 16
"""Lists that a compiled function keeps; the one that was wanted least lately goes first."""

Lists = tuple[Tensor, ...]


@dataclass(frozen=True)
class Source:
    """An argument's memory in this call. ``changes``: that torch has counted; ``constant``: there will be no more."""

    changes: int
    constant: bool


@dataclass
class Entry:
    """What was made of ``memory`` after so many ``changes``; nothing yet when it was seen once."""

    memory: StorageWeakRef
    changes: int
    made: Lists | None


class KeptLists:
    """Those of one compiled function."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[object, ...], Entry] = OrderedDict()
        self._lock = threading.Lock()

    def of(
        self, index: Tensor, nodes: int, source: Source, make: Callable[[Tensor, int], Lists], wraps: bool = True
    ) -> Lists:
        """What ``make`` gives, as copies of what it gave before where that is sure: who reads them may write there."""
        capturing = index.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not source.constant:
            return make(index, nodes)
        with self._lock:
            self._forget()
            key = (wraps, *self._key(index, nodes, source))
            found = self._entries.get(key)
            if found is None or found.changes != source.changes:
                if capturing:
                    return make(index, nodes)
                found = Entry(StorageWeakRef(index.untyped_storage()), source.changes, None)
                if not source.constant:  # it may be another one in each call: kept from the second on
                    self._keep(key, found)
                    return make(index, nodes)
            if found.made is None:
                if capturing:
                    return make(index, nodes)
                found.made = make(index, nodes)
                if index.is_cuda and source.constant:
                    torch.cuda.current_stream(index.device).synchronize()  # other streams may read it from now on
            self._keep(key, found)
            return tuple(t.clone() for t in found.made)

    def __len__(self) -> int:
        """Lists that are held now."""
        return sum(entry.made is not None for entry in self._entries.values())

    def _keep(self, key: tuple[object, ...], entry: Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > MOST:
            self._entries.popitem(last=False)

    def _forget(self) -> None:
        """What is made of memory that nobody has any more."""
        for key in [key for key, entry in self._entries.items() if entry.memory.expired()]:
            del self._entries[key]

    def _key(self, index: Tensor, nodes: int, source: Source) -> tuple[object, ...]:
        """Of the view, and of the stream that made it, whose order makes it ready for who comes next."""
        stream = torch.cuda.current_stream(index.device).cuda_stream if index.is_cuda and not source.constant else 0
        seen = (index.storage_offset(), tuple(index.shape), index.stride(), index.dtype, index.device)
        return (index.untyped_storage()._cdata, *seen, nodes, stream)


class _Call(threading.local):
    now: tuple[KeptLists, Mapping[int, Source]] | None = None


_call = _Call()


def kept(index: Tensor, nodes: int, make: Callable[[Tensor, int], Lists], wraps: bool) -> Lists:
    """``make(index, nodes)``, or what the function that is being called has kept of it.

    Args:
        wraps: what ``make`` takes indices below zero for.
    """
    if _call.now is not None:
        lists, sources = _call.now
        source = sources.get(index.untyped_storage()._cdata)
        if source is not None:
            return lists.of(index, nodes, source, make, wraps)
    return make(index, nodes)


def keeping(compiled: Callable[..., Any], inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """``compiled``, which keeps sorted lists of its arguments of integers.

    Args:
        inputs: like the arguments of each call.
        options: whether those of all arguments are kept, and whether buffers of the model are never changed.
    """
    numbers = [k for k, x in enumerate(inputs) if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)]
    if not numbers:
        return compiled
    lists = KeptLists()

    @functools.wraps(compiled)
    def call(*arguments: Any) -> Any:
        before, _call.now = _call.now, (lists, _sources([arguments[k] for k in numbers], options))
        try:
            return compiled(*arguments)
        finally:
            _call.now = before

    return call


def _sources(tensors: Sequence[Tensor], options: Options) -> dict[int, Source]:
    """By memory. Inference tensors have no count, and two that share memory may count apart: neither is sure."""
    found: dict[int, Source] = {}
    unsure: set[int] = set()
    for t in tensors:
        memory = t.untyped_storage()._cdata
        if t.is_inference() or (memory in found and found[memory].changes != t._version):
            unsure.add(memory)
        else:
            buffer = options.constant_weights and hasattr(t, "_dynamo_static_input_type")
            found[memory] = Source(t._version, buffer)
    sure = {memory: source for memory, source in found.items() if memory not in unsure}
    return {memory: source for memory, source in sure.items() if source.constant or options.keep_lists}

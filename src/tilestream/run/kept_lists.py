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
    changes: object
    made: Lists | None


class KeptLists:
    """Those of one compiled function."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[object, ...], Entry] = OrderedDict()
        self._captured: list[Lists] = []  # by CUDA graphs, whose replays read them
        self._lock = threading.Lock()

    def of(
        self,
        index: Tensor,
        nodes: int,
        source: Source,
        make: Callable[[], Lists],
        how: tuple[object, ...] = (),
        lends: bool = False,
        order: Tensor | None = None,
    ) -> Lists:
        """What ``make`` gives, or gave before where that is sure.

        Args:
            how: what ``make`` does with ``index`` and ``nodes``.
            lends: nobody writes to the results, so that they need not be copies.
            order: what ``make`` reads besides, a list that this call was lent.
        """
        capturing = index.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not source.constant:
            return make()
        with self._lock:
            self._forget()
            changes: object = source.changes
            if order is not None:
                found = self._lent(order)
                if found is None:
                    return make()
                how, changes = (*how, found[0]), (changes, found[1].changes)
            key = (*how, *self._key(index, nodes, source))
            entry = self._entries.get(key)
            if entry is None or entry.changes != changes:
                if capturing:
                    return make()
                entry = Entry(StorageWeakRef(index.untyped_storage()), changes, None)
                if not source.constant and order is None:  # it may be another in each call: kept from the second on
                    self._keep(key, entry)
                    return make()
            if entry.made is None:
                if capturing:
                    return make()
                entry.made = make()
                if index.is_cuda and source.constant:
                    torch.cuda.current_stream(index.device).synchronize()  # other streams may read it from now on
            self._keep(key, entry)
            if capturing:
                self._captured.append(entry.made)
            if not lends:
                return tuple(t.clone() for t in entry.made)
            if index.is_cuda and source.constant and not capturing:
                for t in entry.made:
                    t.record_stream(torch.cuda.current_stream(index.device))
            return entry.made

    def __len__(self) -> int:
        """Lists that are held now."""
        return sum(entry.made is not None for entry in self._entries.values())

    def _lent(self, order: Tensor) -> tuple[tuple[object, ...], Entry] | None:
        memory = order.untyped_storage()._cdata
        entries = ((key, entry) for key, entry in self._entries.items() if entry.made is not None)
        return next((e for e in entries if any(t.untyped_storage()._cdata == memory for t in e[1].made or ())), None)

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


def kept(
    index: Tensor,
    nodes: int,
    make: Callable[[], Lists],
    how: tuple[object, ...],
    lends: bool,
    order: Tensor | None = None,
) -> Lists:
    """What ``make`` gives, or the function that is being called has kept of it (``KeptLists.of``)."""
    if _call.now is not None:
        lists, sources = _call.now
        source = sources.get(index.untyped_storage()._cdata)
        if source is not None:
            return lists.of(index, nodes, source, make, how, lends, order)
    return make()


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

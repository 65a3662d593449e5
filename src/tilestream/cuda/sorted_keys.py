"""Edges sorted by node on the GPU: their order, where each node's edges start, and which nodes have many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from tilestream.cuda import beside, driver
from tilestream.cuda.again import Again, Prepared
from tilestream.cuda.cache import compile_ahead
from tilestream.cuda.diagnose import Record, index_record
from tilestream.kernels.parts.params import Field, Struct, pointers

THREADS, MOST_BITS = 512, 10  # sorted_keys.cuh
TILE = 16 * THREADS
"""Edges of a CTA; so many are sorted by one launch."""
CTAS = 264
"""That count digits, of ``COUNTED`` edges a thread at once: two an SM, which is what is resident."""
COUNTED, READ = 8, 4
FEW_NODES = 1 << 17
"""Whose starts one CTA writes."""
MOST_EDGES = 1 << 30
"""What is posted of a digit has 30 bits."""
DROPPED = -(2**31)
"""The index of an edge of no node: that of sorted_keys.cuh and of ``graph.rewrites.operators``."""
GAP = 64
"""From so many nodes an edge on, each node looks for its edges, since most have none."""
WORDS = 8  # of `head`, in front of its totals
KEPT = 64
"""Sorts of which launches are kept."""

KEYS = Struct(
    "KeyParams",
    (
        *pointers("index", type="const void*"),
        Field("const u64*", "from", note="edges as the pass before left them: node << 32 | edge"),
        *pointers("to", type="u64*"),
        *pointers("keys", "order", "starts", "busy", type="int*"),
        Field("u32*", "head", note="whether nodes descend, how many edges have each digit"),
        Field("u32*", "posted", note="of each pass, tile and digit how many edges have it, there and in front"),
        Field("u64*", "record", note="of lanes::give_up"),
        Field("long long", "nodes"),
        Field("int", "edges"),
        Field("int", "wide", note="int64, not int32"),
        Field("int", "wraps", note="indices below zero count from the end"),
        Field("int", "drops", note="DROPPED is the index of an edge of no node"),
        Field("int", "bits", note="of a digit"),
        Field("int", "passes"),
        Field("int", "pass"),
        Field("int", "tiles"),
        Field("int", "by_node"),
    ),
)


@dataclass(frozen=True)
class Step:
    """One launch: ``of`` is the number of a pass."""

    name: str
    ctas: int
    of: int = 0


SHARED_BYTES = 8 * TILE + (8 << MOST_BITS) + THREADS // 4
"""A tile's edges, for each digit two words, for each warp a sum."""
ASKED = {"count": 4 * (4 << MOST_BITS) + 4, "starts": 0, "picked": 0}
"""Of kernels that hold no tile: the less, the more of their CTAs are on an SM, and wait for memory together."""


def node_record() -> Record:
    """Of an index of a sum by segments that names no node."""
    return index_record(
        lambda _, edge, nodes, found: (
            f"the index of row {edge} of a sum of rows by their indices is {found}, and the sum has {nodes} rows"
        )
    )


@cache  # captured graphs keep its address
def _record(device: torch.device) -> Record:
    return node_record()


def explained(device: torch.device) -> AbstractContextManager[None]:
    """What is called inside fails with an ``InputError`` where an index of this or an earlier call is no node."""
    return _record(device).explained()


def segments(index: Tensor, nodes: int, busy: Tensor, wraps: bool = True, drops: bool = False) -> tuple[Tensor, Tensor]:
    """``index`` (int32 or int64 [edges]) sorted, equal ones in their order.

    Enqueued alone: nothing waits for the GPU, and all may be captured in a graph. An index that is no node ends a
    kernel, as torch's device-side assertion does; ``explained`` says which it was.

    Args:
        busy: int32 [1 + 2 (edges / ``LONG``)], gets how many pieces nodes of more edges are summed in, and which.
        wraps: indices below zero count from the end; else they are no nodes.
        drops: edges whose index is ``DROPPED`` are of no node.

    Returns:
        order: int32 [edges], the edges' places; those of no node behind all others.
        starts: int32 [nodes + 1], where each node's edges start in ``order``, and the end.
    """
    index, edges = index.contiguous(), len(index)
    starts = index.new_empty(nodes + 1, dtype=torch.int32)
    if edges == 0:
        busy.zero_()
        return index.new_empty(0, dtype=torch.int32), starts.zero_()
    need = needs(edges, nodes + drops)
    # Given back when all is enqueued, to who comes behind on the stream.
    scratch = index.new_empty(need.scratch, dtype=torch.int64)
    pairs = scratch.data_ptr()
    posted = pairs + 16 * need.pairs
    keys = posted + 4 * need.posted
    head = keys + 4 * edges if need.head else 0
    if edges >= MOST_EDGES:
        sorted_keys, order = _by_torch(index, nodes, wraps, drops)
        keys = sorted_keys.data_ptr()
        busy.zero_()
    else:
        order = index.new_empty(edges, dtype=torch.int32)
    at = index.data_ptr(), order.data_ptr(), starts.data_ptr(), busy.data_ptr(), keys, posted, head

    def made() -> Iterator[tuple[Step, bytes]]:
        given = dict(zip(("index", "order", "starts", "busy", "keys", "posted", "head"), at, strict=True))
        places = [0, *(pairs + 8 * need.pairs * (k % 2) for k in range(need.passes - 1)), 0]
        fixed = {"nodes": nodes, "edges": edges, "wide": int(index.dtype == torch.int64), "wraps": int(wraps)}
        fixed |= {"bits": need.bits, "passes": need.passes, "tiles": -(-edges // TILE), "by_node": int(need.by_node)}
        fixed |= {"drops": int(drops), "record": _record(index.device).address}
        for step in need.steps:
            own = {"from": places[step.of], "to": places[step.of + 1], "pass": step.of}
            yield step, KEYS.pack(**given, **fixed, **own)

    _enqueue((edges, nodes, wraps, drops, index.dtype.itemsize, *at), made, index.device, (head, need.head))
    return order, starts


def picked(index: Tensor, order: Tensor, rows: int, wraps: bool = True) -> Tensor:
    """``index[order]`` as int32 [edges]; one that is no row ends the kernel, as in ``segments``, and so does one below
    zero unless it ``wraps``: counts from the end of ``rows``."""
    index, edges = index.contiguous(), len(order)
    found = torch.empty_like(order)
    if edges:
        given = {"index": index.data_ptr(), "order": order.data_ptr(), "keys": found.data_ptr(), "nodes": rows}
        given |= {"edges": edges, "wide": int(index.dtype == torch.int64), "wraps": int(wraps)}

        def made() -> Iterator[tuple[Step, bytes]]:
            rest = dict.fromkeys((field.name for field in KEYS.fields), 0)
            step = Step("picked", -(-edges // (READ * THREADS)))
            yield step, KEYS.pack(**rest | given | {"record": _record(index.device).address})

        _enqueue(tuple(given.values()), made, index.device)
    return found


@dataclass(frozen=True)
class Needs:
    """What a sort of so many edges takes: launches, digits, and scratch memory.

    Attributes:
        pairs: edges of each of two copies, 8 bytes an edge.
        keys: nodes of the sorted edges, 4 bytes each.
        posted, head: words of 32 bits; those of ``head`` are zero when the first launch begins.
        scratch: words of 64 bits of all of these.
    """

    steps: tuple[Step, ...]
    bits: int
    passes: int
    by_node: bool
    pairs: int
    posted: int
    keys: int
    head: int

    @property
    def scratch(self) -> int:
        return 2 * self.pairs + (self.posted + self.keys + self.head + 1) // 2


@lru_cache(maxsize=256)
def needs(edges: int, nodes: int) -> Needs:
    """What sorting ``edges`` by ``nodes`` nodes takes."""
    (bits, passes), made = digits_of(nodes), tuple(steps(edges, nodes))
    own, several = len(made) > 2, len(made) > 1
    posted = -(-edges // TILE) * (passes << bits) if own else 0
    head = WORDS + (passes << bits) if own else 0
    pairs = edges if own and passes > 1 else 0
    keys = edges if edges < MOST_EDGES else 0
    return Needs(made, bits, passes, several and _by_node(edges, nodes), pairs, posted, keys, head)


def digits_of(nodes: int) -> tuple[int, int]:
    """Bits of a digit, and how many digits nodes below ``nodes`` have: as few as can be, of like size."""
    bits = max(1, (nodes - 1).bit_length())
    passes = -(-bits // MOST_BITS)
    return -(-bits // passes), passes


def steps(edges: int, nodes: int) -> list[Step]:
    """The launches for so many edges, at least one."""
    if edges <= TILE and nodes <= FEW_NODES:
        return [Step("few", 1)]
    tiles, threads = -(-edges // TILE), 1 + max(edges, nodes if _by_node(edges, nodes) else 0)
    starts = Step("starts", -(-threads // (READ * THREADS)))
    if edges >= MOST_EDGES:
        return [starts]
    passes = [Step("scatter", tiles, k) for k in range(digits_of(nodes)[1])]
    return [Step("count", min(CTAS, -(-edges // (COUNTED * THREADS)))), *passes, starts]


def begin() -> None:
    """Begin to compile the kernels, that nobody waits for yet."""
    compile_ahead([beside.BesideSource("sorted keys", text(), SHARED_BYTES)])


def _by_node(edges: int, nodes: int) -> bool:
    return nodes >= GAP * edges


def _by_torch(index: Tensor, nodes: int, wraps: bool, drops: bool) -> tuple[Tensor, Tensor]:
    """The nodes of more edges than have room in what tiles post, ascending, and their edges."""
    wrapped = torch.where(index < 0, index + nodes, index) if wraps else index
    named = (wrapped >= 0) & (wrapped < nodes)
    if drops:
        named, wrapped = named | (index == DROPPED), torch.where(index == DROPPED, nodes, wrapped)
    torch.ops.aten._assert_async.msg(named.all(), "an index of a sum of rows names no row")
    keys, order = torch.sort(wrapped.int(), stable=True)
    return keys, order.int()


def _enqueue(
    key: tuple[int, ...],
    made: Callable[[], Iterator[tuple[Step, bytes]]],
    device: torch.device,
    clear: tuple[int, int] = (0, 0),
) -> None:
    """Launches on torch's stream.

    Args:
        key: all that ``made`` depends on.
        clear: an address, and how many words there are to be zero before.
    """
    at = device.index or 0
    stream = torch._C._cuda_getCurrentRawStream(at)

    def prepare(_: int) -> list[Prepared]:
        cleared = [driver.Clearing(*clear, stream)] if clear[1] else []
        functions = ((_function(step.name, at), step, packed) for step, packed in made())
        return [*cleared, *(f.prepare((step.ctas, 1), THREADS, stream, packed) for f, step, packed in functions)]

    _again(at).enqueue((stream, *key), stream, prepare)


def _function(name: str, device_index: int) -> driver.Function:
    return beside.function(f"tilestream_{name}", text(), device_index, SHARED_BYTES, ASKED.get(name))


@cache
def _again(device_index: int) -> Again:
    return Again(device_index, KEPT)


@cache
def text() -> str:
    """The source of all kernels."""
    return f'#define THREADS {THREADS}\n#include "lanes.cuh"\n{KEYS.text}\n#include "sorted_keys.cuh"\n'

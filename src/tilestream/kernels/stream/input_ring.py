"""Chunks of input on their way: what a consumer waits for them, slot by slot of its ring.

A loader warp asks for a chunk when the ring has room, one after another; a consumer takes chunks in the same order, and
gives a slot back when it is done with it. So with two slots the third chunk of an epilogue is asked for when the first
is used up, and comes a memory's latency later, however much time there was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline
from tilestream.kernels.stream.layout import CHUNK
from tilestream.kernels.stream.model import Schedule, Stream, columns_of

GATHER_CHUNK_S = 1.6e-6
"""Of a loader warp, for 64 rows of 128 bytes taken through an index. On an H200 three layers of 128 on 88,000 rows take
52 us with four such chunks a tile and 41 without, two of 512 on 81,900 rows 400 with sixteen and 297 without."""
TAP_CHUNK_S = 0.75e-6
"""The same for pixels, whose places are computed and not read. On an H200 a 3 x 3 64-64 and a 1 x 1 64-256 take 48.5 us
at 32 images of 56 x 56 (54 chunks a loader warp) and 10.2 at one (9 chunks), where bulk copies take 27.7 and 7.1."""
ODD_ROUND_S, ODD_PART_S = 0.8e-6, 1.6e-6
"""Of a loader warp, for 64 vectors of 16 bytes of rows that TMA cannot address: of whole rows, each made in shared
memory at once, and of others, scattered."""
ISSUE_S = 0.3e-6
"""Of a loader warp's lane, for a bulk copy: eight chunks take 2.4 us on an H200, nearly all of it the latency of one
instruction after another."""
VECTOR_BYTES = 16
TILES = 4
"""Until the ring's state repeats."""


@dataclass(frozen=True)
class Take:
    """What a consumer does next: wait for a chunk, if there is one, then work ``busy_s``.

    ``loader_s``: of the loader warp for the chunk; ``latency_s``: from then until it is there.
    """

    busy_s: float
    loader_s: float = 0.0
    latency_s: float = 0.0
    chunk: bool = True


def run(takes: Sequence[Take], slots: int, tiles: int) -> list[float]:
    """When a consumer is done with each of so many tiles, from the loader's first request on."""
    released: list[float] = []
    loader = consumer = 0.0
    done = []
    for _ in range(tiles):
        for take in takes:
            if take.chunk:
                room = released[-slots] if len(released) >= slots else 0.0
                loader = max(loader, room) + take.loader_s
                consumer = max(consumer, loader + take.latency_s)
            consumer += take.busy_s
            if take.chunk:
                released.append(consumer)
        done.append(consumer)
    return done


def waits(takes: Sequence[Take], slots: int, device: Device) -> tuple[float, float]:
    """Seconds of each tile, among many, that a consumer waits for chunks; and what the first tile takes longer than
    those behind it, but for a load, which is part of ``launch_s``."""
    if not any(take.chunk for take in takes):
        return 0.0, 0.0
    done = run(takes, slots, TILES)
    each = (done[-1] - done[1]) / (TILES - 2)
    return max(0.0, each - sum(take.busy_s for take in takes)), max(0.0, done[0] - each - device.load_s)


def takes_of(
    schedule: Schedule,
    pipeline: Pipeline,
    products_s: Sequence[float],
    passes_s: Sequence[Sequence[float]],
    device: Device,
    loading: int,
) -> list[Take]:
    """What a consumer of a tile does in order.

    Args:
        products_s: of each step, its product. passes_s: of each step, its passes.
        loading: CTAs that load side by side, as ``Arrivals`` has it.
    """
    arrivals = Arrivals(schedule, pipeline, device, loading)
    made: list[Take] = []
    for step, product_s, each_s in zip(schedule.steps, products_s, passes_s, strict=True):
        made += _spread(arrivals.of(schedule.product_chunks(step)), product_s)
        for phase, pass_s in zip(step.phases, each_s, strict=True):
            made += _spread(arrivals.of(schedule.epilogue_chunks(step, phase)), pass_s)
    return made


def _spread(chunks: Iterable[tuple[float, float]], busy_s: float) -> list[Take]:
    chunks = list(chunks)
    if not chunks:
        return [Take(busy_s, chunk=False)]
    return [Take(busy_s / len(chunks), *chunk) for chunk in chunks]


@dataclass
class Arrivals:
    """Seconds of the loader, and of the memory, for the chunks of a tile one after another.

    ``loading``: CTAs that load side by side, each at its share of the DRAM's rate.
    """

    schedule: Schedule
    pipeline: Pipeline
    device: Device
    loading: int = 0
    seen: set[tuple[str, int]] = field(default_factory=set)
    asked: bool = False

    def of(self, chunks: Iterable[tuple[str, int]]) -> Iterator[tuple[float, float]]:
        """(loader, latency) of each chunk: a stream and its first column."""
        for chunk in chunks:
            yield self._chunk(*chunk, chunk in self.seen)
            self.seen.add(chunk)

    @property
    def share_s(self) -> float:
        """Of both loaders at their CTA's share, where all CTAs load; of several stages the launch counts the memory."""
        rings = 2 if self.schedule.stage.placement.dim == 0 else 1
        every = len(self.pipeline.stages) == 1
        return rings * CHUNK * self.loading / self.device.dram_bytes_per_s if every else 0.0

    def _chunk(self, tile: str, column: int, again: bool) -> tuple[float, float]:
        stream, device = self.schedule.streams[tile], self.device
        latency = device.again_s if again else device.load_s
        if stream.queue:  # flags of all queues are asked for side by side, once a tile: the L2 has the chunks then
            asked, self.asked = self.asked, True
            return (ISSUE_S if asked else device.queue_s(0)), device.again_s
        if stream.index:
            return GATHER_CHUNK_S, 0.0
        if stream.tap is not None:
            return (ISSUE_S, latency) if stream.tap.bulk else (TAP_CHUNK_S, 0.0)
        odd = odd_s(stream, self.pipeline.tensor(stream.tensor).features, column)
        return (odd, 0.0) if odd else (max(ISSUE_S, 0.0 if again else self.share_s), latency)


def odd_s(stream: Stream, features: int, column: int) -> float:
    """Seconds of a loader warp for a chunk of rows of ``features`` that bulk copies cannot address
    (``kernels/include/odd_rows.cuh``); none of others. Rows lie one behind another.
    """
    if stream.in_bulk(column, features):
        return 0.0
    return odd_chunk_s(DTYPE_BYTES[stream.dtype], features, stream.valid(column))


def odd_chunk_s(size: int, features: int, valid: int) -> float:
    """The same for ``valid`` columns of such rows, elements of ``size`` bytes."""
    each = VECTOR_BYTES // size  # lanes have two of them on their way at a time
    if valid == features:
        whole = size == 2 and features > each
        return ODD_ROUND_S * (columns_of("bf16") // each) if whole else ODD_PART_S * ceil(features / each)
    vectors = (valid + each - 2) // each + 1 if features > each else ceil(features / each)
    return ODD_PART_S * vectors

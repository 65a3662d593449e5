"""The ring queue measured by payload, depth and transport, as Kitsune's section 2.1 does.

Two stages, as many replicas of each as there are pairs of SMs. The producer reads one number a row, adds it to a
vector of the tile's width and hands the tile on; the consumer keeps the largest element of each row. So DRAM sees
two columns, and what is timed is the hand-over of the tile: written once and read once by another SM.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilestream.cuda import available, build
from tilestream.errors import DeviceError, OptionError
from tilestream.ir.pipeline import (
    DTYPE_BYTES,
    TILE_ROWS,
    Pipeline,
    Queue,
    Residency,
    Role,
    Shard,
    Stage,
    Tensor,
    Tile,
    TileOp,
    Transport,
)
from tilestream.ir.verify import WIDEST
from tilestream.run.timing import replay_us

PAYLOADS = (2_048, 8_192, 16_384, 32_768, 65_536)
DEPTHS = (2, 4, 8)
ROW_BYTES = TILE_ROWS * DTYPE_BYTES["bf16"]
RUN_S = 1e-3  # one run lasts about this long: thousands of hand-overs a pair, so that its start does not count
HANDOVER_S, PAIR_BYTES_PER_S = 0.9e-6, 40e9  # a guess of the curve, to choose the rows
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """``payload``: bytes of a tile. ``depth``: tiles in flight for each pair of SMs; 0 for DRAM."""

    transport: Transport
    payload: int
    depth: int

    @property
    def width(self) -> int:
        return self.payload // ROW_BYTES

    @property
    def placement(self) -> Shard:
        return Shard(0) if self.width <= WIDEST[0] else Shard(1)


def cases(payloads: Sequence[int], depths: Sequence[int], transports: Sequence[str]) -> list[Case]:
    """Every combination that is legal: a replica of two tiles a step has at least two in flight.

    Raises:
        OptionError: a payload, depth or transport that no pipeline can have.
    """
    known = [Transport.L2.value, Transport.DRAM.value]
    for transport in transports:
        if transport not in known:
            raise OptionError(f"transport {transport!r} is not known", f"use some of {', '.join(known)}")
    least, most = 8 * ROW_BYTES, max(WIDEST.values()) * ROW_BYTES
    for payload in payloads:
        if payload % least or not least <= payload <= most:
            raise OptionError(
                f"payload {payload} is not a tile of {TILE_ROWS} bf16 rows of 8 to {max(WIDEST.values())} features",
                f"use a multiple of {least} up to {most} bytes",
            )
    for depth in depths:
        if depth < 2 or depth % 2:
            raise OptionError(f"depth {depth} is not an even number of tiles", "use 2, 4, 6, ...")
    made = []
    for transport in map(Transport, transports):
        for payload in payloads:
            made += [Case(transport, payload, d) for d in ((0,) if transport is Transport.DRAM else depths)]
    return made


def pipeline(case: Case, pairs: int) -> Pipeline:
    """Producer and consumer on ``pairs`` SMs each; through DRAM, one launch after the other on all of them."""
    replicas = pairs if case.transport is Transport.L2 else 2 * pairs
    tile, width = Tile.of("tile", case.width, "bf16"), case.width
    tensors = (
        Tensor.of("x", Role.INPUT, (1,), "bf16"),
        Tensor.of("row", Role.PARAMETER, (width,), "bf16"),
        Tensor.of("y", Role.OUTPUT, (1,), "bf16"),
    )
    produce = (
        TileOp("load", Tile.of("column", 1, "bf16"), (), ("x",)),
        TileOp("add", tile, ("column",), ("row",)),
    )
    consume = (TileOp("max", Tile.of("largest", 1, "bf16"), ("tile",)), TileOp("store", None, ("largest",), ("y",)))
    stages = (
        Stage.of("producer", produce, replicas, case.placement, Residency.RESIDENT),
        Stage.of("consumer", consume, replicas, case.placement, Residency.RESIDENT),
    )
    queue = Queue("tile", "producer", ("consumer",), case.transport, case.depth * pairs, "bench queues")
    name = f"queue_{case.transport}_{case.payload}_{case.depth}"
    return Pipeline(name, tensors, stages, (queue,), "spatial" if case.depth else "bulk")


def tiles_for(case: Case, pairs: int, l2_bytes: int) -> int:
    """Tiles of a run of about ``RUN_S``; through DRAM at least four times the L2, so that it does not stay there."""
    tiles = math.ceil(pairs * RUN_S / (HANDOVER_S + case.payload / PAIR_BYTES_PER_S))
    if case.transport is Transport.DRAM:
        tiles = max(tiles, 4 * l2_bytes // case.payload)
    return tiles


@dataclass
class _Arm:
    case: Case
    tiles: int
    graph: torch.cuda.CUDAGraph
    keep: object
    samples: list[float]


def run(
    payloads: Sequence[int] = PAYLOADS,
    depths: Sequence[int] = DEPTHS,
    transports: Sequence[str] = ("l2", "dram"),
    seconds: float = 10.0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, str | int | float]]:
    """Measure every combination, interleaved, for ``seconds`` in all after compiling.

    Args:
        payloads: bytes of a tile: 64 rows of bf16, so multiples of 1024 up to 65,536. Tiles wider than 256 features
            are shared by a stage's two warpgroups; narrower ones go two at a time.
        depths: tiles in flight for each pair of SMs, even.
        transports: ``l2`` (one launch, rings in L2) and ``dram`` (two launches, the whole tensor between them).
        seconds: measuring time.
        progress: told what is being done.

    Returns:
        A dict a combination: ``transport``, ``payload_bytes``, ``depth`` (0: DRAM), ``pairs`` of SMs, ``tiles`` of a
        run, ``us_a_tile`` (a pair's time for one tile; median over graph replays), ``payload_tb_per_s`` (all pairs;
        each byte counted once, though written and read) and ``ring_mb``.

    Raises:
        DeviceError: there is no GPU that the kernels run on, or a result is wrong.
        OptionError: a payload, depth or transport that no pipeline can have.
    """
    chosen = cases(payloads, depths, transports)
    if why := available():
        raise DeviceError(f"queues can only be measured on a Hopper GPU: {why}", "run this on an H100 or H200")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    pairs = properties.multi_processor_count // 2
    arms = []
    for case in chosen:
        progress(f"compiling {case.transport} {case.payload} bytes, depth {case.depth}")
        arms.append(_capture(case, pairs, properties.L2_cache_size))
    progress("measuring")
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for arm in arms:
            arm.samples.append(replay_us(arm.graph) * 1e-6)
        rounds += 1
    return [_result(arm, pairs) for arm in arms]


def _capture(case: Case, pairs: int, l2_bytes: int) -> _Arm:
    """Build, check once against torch, and capture one call in a CUDA graph."""
    tiles = tiles_for(case, pairs, l2_bytes)
    rows = tiles * TILE_ROWS
    compiled = build(pipeline(case, pairs))
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, 1, device="cuda", generator=generator).bfloat16()
    row = torch.randn(case.width, device="cuda", generator=generator).bfloat16()
    tensors = {"x": x, "row": row}
    out = {"y": torch.full_like(x, float("nan"))}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(tensors, rows, out=out)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    # Rounding is monotonic: the largest of the rounded sums is the rounded largest sum.
    expected = (x.float() + row.float().max()).bfloat16()
    if not torch.equal(out["y"], expected):
        raise DeviceError(f"{compiled.pipeline.name} computes a wrong result", "report this with the GPU and driver")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(tensors, rows, out=out)
    graph.replay()
    return _Arm(case, tiles, graph, (compiled, tensors, out), [])


def _result(arm: _Arm, pairs: int) -> dict[str, str | int | float]:
    case, seconds = arm.case, statistics.median(arm.samples)
    return {
        "transport": case.transport.value,
        "payload_bytes": case.payload,
        "depth": case.depth,
        "pairs": pairs,
        "tiles": arm.tiles,
        "us_a_tile": seconds / arm.tiles * pairs * 1e6,
        "payload_tb_per_s": arm.tiles * case.payload / seconds / 1e12,
        "ring_mb": case.depth * pairs * case.payload / 1e6,
    }

"""Times of collectives by themselves on the GPU that is there, and those that were kept."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tilestream.bench.exchange import BLOCK_BYTES, GATHERS, THREADS, Exchange, Kind, map_sizes, params
from tilestream.cuda import driver
from tilestream.cuda.cache import compiled
from tilestream.devices import Device
from tilestream.errors import DeviceError, VerifyError
from tilestream.kernels.parts.params import LINE_BYTES
from tilestream.kernels.parts.tensor_maps import MatrixMap
from tilestream.kernels.product.shared_tile.model import PHASES
from tilestream.kernels.stream.layout import SHARED_LIMIT

PEERS = (2, 4, 8, 16)
PARTS = (1024, 4096, 8192, 16_384, 32_768)
"""Bytes of a part of a gather."""
TILES = (4096, 16_384, 65_536)
"""Bytes of an fp32 tile of a sum."""
TIMES = (100, 1100)
"""Exchanges of a short and of a long launch: their difference has no launch in it."""
ROUNDS = 5
LIMIT_NS = 1_000_000_000


@dataclass(frozen=True)
class Timed:
    """``us`` of one exchange by ``ctas`` CTAs at once, ``peers`` in each group, and what a CTA takes in meanwhile.

    ``error``: the largest of an element after one exchange, as ``Exchange.error_bound`` counts it.
    """

    kind: str
    peers: int
    tile_bytes: int
    ctas: int
    us: float
    gb_per_s: float
    error: float

    @property
    def right(self) -> bool:
        return self.error <= Exchange(Kind(self.kind), self.peers, self.tile_bytes).error_bound


def exchanges() -> list[Exchange]:
    """All that fit, the small ones of every kind first: time may run out."""
    found = []
    for kind in Kind:
        for size in (TILES[0],) if kind is Kind.BARRIER else PARTS if kind in GATHERS else TILES:
            for peers in PEERS:
                try:
                    found.append(Exchange(kind, peers, size))
                except VerifyError:
                    continue
    return sorted(found, key=lambda e: e.tile_bytes)


def resident(e: Exchange, function: driver.Function) -> int:
    """CTAs of whole groups that are on the device at once, one an SM: asked of the device."""
    if e.cluster > 1:
        return function.resident_clusters(THREADS, e.cluster) * e.cluster
    return torch.cuda.get_device_properties(0).multi_processor_count // e.peers * e.peers


class Runner:
    """One exchange on all groups that are resident. A CTA is given all of an SM's shared memory, as kernels for few
    rows take about as much: else several would share an SM, and its port to the others.

    Raises:
        DeviceError: no group of it is resident.
    """

    def __init__(self, e: Exchange) -> None:
        driver.ensure_context(0)
        self.e, self.function = e, driver.Function(compiled(e).cubin, e.name, SHARED_LIMIT, e.cluster)
        self.ctas = resident(e, self.function)
        if self.ctas == 0:
            raise DeviceError(f"no cluster of {e.peers} CTAs is resident", "use smaller clusters or tiles")
        shape = (self.ctas, e.tile_bytes // 4)
        self.tiles = torch.randn(shape, device="cuda") + 1
        self.out = torch.empty(e.out_bytes(self.ctas) // 4, device="cuda")
        self.between = torch.zeros(e.between_bytes(self.ctas), device="cuda", dtype=torch.uint8)
        self.flags = torch.zeros(PHASES * self.ctas * LINE_BYTES + 64, device="cuda", dtype=torch.uint8)

    def launch(self, times: int) -> None:
        e, base = self.e, self.between.data_ptr()
        columns, rows, row_bytes, box_rows, box_columns = map_sizes(e, self.ctas)
        made = driver.encoded(MatrixMap("bf16", base, columns, rows, row_bytes, box_rows, box_columns))
        flags = self.flags.data_ptr()
        dump = flags + PHASES * self.ctas * LINE_BYTES
        packed = params(e, made, self.tiles.data_ptr(), self.out.data_ptr(), base, flags, dump, LIMIT_NS, times)
        stream = torch.cuda.current_stream().cuda_stream
        self.function.launch((self.ctas, 1), THREADS, stream, packed, cooperative=True)

    def us(self) -> float:
        """Microseconds of one exchange: the median of differences of long and short launches."""
        found = []
        for _ in range(ROUNDS + 1):
            took = []
            for times in TIMES:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                self.launch(times)
                end.record()
                end.synchronize()
                took.append(1e3 * start.elapsed_time(end))
            found.append((took[1] - took[0]) / (TIMES[1] - TIMES[0]))
        return statistics.median(found[1:])

    def error(self) -> float:
        """The largest of an element after one exchange, as ``Exchange.error_bound`` counts it; NaN if one is NaN."""
        e = self.e
        self.out.fill_(float("nan"))
        self.between.zero_()
        self.launch(1)
        torch.cuda.synchronize()
        each = self.tiles.double().view(-1, e.peers, self.tiles.shape[1])
        if e.kind is Kind.BARRIER:
            return 0.0
        if e.gathers:
            return _largest(self.out.view(-1, e.peers, e.peers, each.shape[-1]), each[:, None], each[:, None].abs())
        whole = each.prod(1) if e.kind is Kind.ALL_MUL else each.sum(1)
        scale = whole.abs() if e.kind is Kind.ALL_MUL else each.abs().sum(1)
        if e.kind is Kind.ADD_MEMORY:
            got = self.between.view(torch.bfloat16).view(-1, 64, 8 * e.blocks)
            return _largest(got, rows_of(whole), rows_of(scale))
        got = self.out.view_as(each).double()
        if e.kind in (Kind.SCATTER_DSM, Kind.SCATTER_L2):  # each has its own blocks
            blocks = torch.arange(e.blocks, device="cuda")[None, :] % e.peers
            mine = (blocks == torch.arange(e.peers, device="cuda")[:, None])[None, :, :, None]
            shape = (-1, e.peers, e.blocks, 512)
            got = got.view(shape).where(mine, whole[:, None].expand_as(each).reshape(shape)).view_as(each)
        return _largest(got, whole[:, None], scale[:, None])


def rows_of(fragments: torch.Tensor) -> torch.Tensor:
    """Accumulators ``[..., blocks x 128 lanes x 4]`` as they lie in a matrix, ``[n, 64 rows, 8 blocks columns]``."""
    # block, warp, row, quad, half, column
    t = fragments.reshape(-1, fragments.shape[-1] * 4 // BLOCK_BYTES, 4, 8, 4, 2, 2)
    return t.permute(0, 2, 5, 3, 1, 4, 6).reshape(t.shape[0], 64, -1)


def _largest(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> float:
    return float(((got.double() - want).abs() / scale.clamp_min(1e-30)).max())


def measure(some: Sequence[Exchange], seconds: float) -> Iterator[Timed]:
    """Times of ``some`` until ``seconds`` are over; kernels are compiled ahead."""
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(8) as pool:
        for e, ready in [(e, pool.submit(compiled, e)) for e in some]:
            if time.monotonic() > end:
                ready.cancel()
                continue
            ready.result()
            try:
                runner = Runner(e)
            except DeviceError:
                continue
            error, us = runner.error(), runner.us()
            yield Timed(e.kind, e.peers, e.tile_bytes, runner.ctas, us, e.received_bytes / us / 1e3, error)


def load(path: Path) -> tuple[Timed, ...]:
    """What a file of ``benchmarks/run/collectives.py`` holds; nothing without the file."""
    if not path.exists():
        return ()
    return tuple(Timed(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"])


def dump(rows: Sequence[Timed], environment: dict[str, object]) -> str:
    return json.dumps({"environment": environment, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"


def gather_through_dsm(rows: Sequence[Timed]) -> tuple[float, float]:
    """Seconds of a hand-over and bytes/s of an SM's port: what a gather through DSM takes, in a kernel that has no
    cluster's barrier in it, is ``seconds + bytes taken in / rate``, by least squares of the relative errors.

    Raises:
        ValueError: there are no times of gathers through DSM, or of a barrier.
    """
    barrier = [r.us for r in rows if r.kind == Kind.BARRIER]
    gathers = [r for r in rows if r.kind == Kind.GATHER_DSM]
    if not barrier or len(gathers) < 2:
        raise ValueError("no times of gathers through DSM, and of a cluster's barrier")
    us = np.array([r.us - statistics.median(barrier) for r in gathers])
    taken = np.array([(r.peers - 1) * r.tile_bytes for r in gathers], dtype=float)
    (first_us, us_a_byte), *_ = np.linalg.lstsq(np.stack([1 / us, taken / us], 1), np.ones(len(us)))
    return 1e-6 * float(first_us), 1e6 / float(us_a_byte)


def compared(rows: Sequence[Timed], device: Device) -> list[tuple[str, float, float]]:
    """What ``device`` is described by beside what ``rows`` say: a name, the description's figure, the measured one.

    Clusters that are resident, by size; bytes/s that all SMs take in of their peers when all send to all, of the
    largest parts; the hand-over of a part to the next CTA of a cluster of 2, in seconds.
    """
    made: list[tuple[str, float, float]] = []
    gathered = [r for r in rows if r.kind == Kind.GATHER_DSM]
    for size, count in device.clusters:
        mine = [r for r in gathered if r.peers == size]
        if mine:
            largest = max(mine, key=lambda r: r.tile_bytes)
            made.append((f"resident clusters of {size}", count, largest.ctas / size))
            made.append(
                (f"DSM bytes/s, clusters of {size}", device.dsm_bytes_per_s, largest.gb_per_s * 1e9 * largest.ctas)
            )
    for row in sorted(gathered, key=lambda r: r.tile_bytes):
        if row.peers == 2:
            made.append((f"hand-over of {row.tile_bytes} bytes", device.dsm_s(row.tile_bytes), row.us * 1e-6))
    return made

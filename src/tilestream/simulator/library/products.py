"""A library's GEMM: its family of kernels by alignment, its tiles by time, its traffic by the L2. Numbers alone.

Whatever the library's heuristics are, the tiles here are those that take the least time of all, memory included: so
more SMs or more bandwidth never slow a product down, and more rows never speed it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, gcd

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES


@dataclass(frozen=True)
class Product:
    """``batch`` products of [m, k] and [k, n]; ``dtype`` of operands and result (``bf16``, ``f16``, ``f32``).

    ``layout`` says how the operands lie: ``nt`` a linear's (weight as [n, k]), ``nn`` as written, ``tn`` a weight
    gradient's (both as [k, ...]). ``pitch``: elements from one row of the result to the next; 0 says ``n``.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "nn"
    pitch: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES.get(self.dtype, 2)

    @property
    def operand_bytes(self) -> float:
        return float(self.batch * (self.m + self.n) * self.k * self.itemsize)

    @property
    def result_bytes(self) -> float:
        return float(self.batch * self.m * self.n * self.itemsize)

    @property
    def aligned(self) -> int:
        """Bytes that every row of both operands and of the result is a multiple of: 2 to 16."""
        inner = {"nt": (self.k,), "nn": (self.k, self.n), "tn": (self.m, self.n)}[self.layout]
        return gcd(16, *(length * self.itemsize for length in (*inner, self.pitch or self.n)))

    def rate_dtype(self, device: Device) -> str:
        """The dtype whose tensor rate counts: bf16's for what the device does not list."""
        return self.dtype if self.dtype in device.tensor_flops else "bf16"

    def partial_bytes(self, splits: int) -> float:
        """Bytes of split sums, written as fp32 and read again."""
        return 8.0 * self.batch * self.m * self.n * splits if splits > 1 else 0.0


@dataclass(frozen=True)
class Beside:
    """What a GEMM does beside its product.

    ``simt_ops`` and ``sfu_ops`` are its epilogue's. ``dram_read`` and ``dram_write`` are distinct bytes of the whole
    kernel, by default each operand and the result once; of those, the L2 holds the share ``cached`` from before.
    ``more_products`` of ``more_flops`` run in the same tiles, one after another: those of a vertically fused group.
    """

    simt_ops: float = 0.0
    sfu_ops: float = 0.0
    dram_read: float | None = None
    dram_write: float | None = None
    cached: float = 0.0
    more_flops: float = 0.0
    more_products: int = 0

    def distinct(self, product: Product) -> tuple[float, float]:
        """Distinct bytes read and written."""
        read = product.operand_bytes if self.dram_read is None else self.dram_read
        return read, product.result_bytes if self.dram_write is None else self.dram_write


@dataclass(frozen=True)
class Family:
    """Kernels for operands whose rows are multiples of ``least`` bytes.

    ``tiles``: rows, columns, CTAs of an SM. ``latency_s`` of each tile: first loads, last products, what of the
    epilogue no other tile covers. ``store``: lane operations a result, ``odd_store`` more where a linear's rows of
    results are no multiple of 16 bytes. ``copies``: elements that an SM takes in a cycle, where threads copy operands
    one by one; 0 where whole lines come by themselves.
    """

    least: int
    tiles: tuple[tuple[int, int, int], ...]
    latency_s: float
    store: float | None = None
    odd_store: float = 0.0
    copies: float = 0.0


def _both(*tiles: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(dict.fromkeys((a, b, 1) for pair in tiles for a, b in (pair, pair[::-1])))


LINES = Family(
    16,
    _both(
        *((320, 128), (256, 160), (192, 192), (256, 128), (256, 96), (192, 128), (192, 96), (128, 160), (128, 128)),
        *((128, 96), (128, 64), (64, 96), (64, 64), (64, 48), (64, 32), (64, 16)),
    ),
    latency_s=1.4e-6,
)
"""Hopper's kernels, on TMA and wgmma; their store is the device's ``handoff_ops``. The latency is the best value for
the validation set; the fit itself gives 1.99 us (docs/truth.md)."""
WORDS = Family(4, ((256, 128, 1), (128, 256, 1), (128, 64, 2)), 0.97e-6, store=37.0, copies=8.1)
"""cp.async of four or eight bytes."""
SINGLES = Family(2, ((128, 128, 2), (64, 64, 4), (32, 32, 4)), 4.4e-6, store=27.0, odd_store=49.0, copies=4.2)
"""Element by element, through registers. Both are kernels from before Hopper, so that cycles hold on an A100 too."""
FAMILIES = (LINES, WORDS, SINGLES)

SMALL = 0.9
"""A tile reaches ``1 / (1 + SMALL (1 / rows + 1 / columns))`` of the tensor rate: small ones reread operands."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SPLIT_K = 256
"""Least depth that a CTA keeps when its sum is split among CTAs."""
REDUCE_S = 4.6e-6
"""Of the kernel that adds split sums up, with the gap before it."""
APART = 0.025
"""Share of the shorter of compute and memory time that does not run beside the longer."""
MULTICAST = 2
"""CTAs of a cluster that share what they load, where the device has clusters."""
DEPTH = 32
PANEL = 0.5
"""Share of the L2 that holds a panel of one operand while the other streams past."""


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of output of a CTA, parts of the sum, CTAs of an SM; and what the kernel takes with them.

    ``tensor_s``, ``lane_s``: of one tile on one SM. ``compute_s``, ``memory_s`` and ``seconds``: of the kernel, without
    the gap before it. ``dram_read``: distinct bytes, and those that come again since the L2 does not hold them.
    """

    rows: int
    columns: int
    splits: int
    ctas_per_sm: int
    tiles: int
    tensor_s: float
    lane_s: float
    compute_s: float
    memory_s: float
    shared_read: float
    multicast: int
    dram_read: float
    seconds: float


PLAIN = Beside()


def family_of(product: Product) -> Family:
    return next(f for f in FAMILIES if product.aligned >= f.least)


@contextmanager
def families(*given: Family) -> Iterator[None]:
    """A library of these kernels, for the time of a study."""
    global FAMILIES
    before = FAMILIES
    try:
        FAMILIES = given
        tiling.cache_clear()
        yield
    finally:
        FAMILIES = before
        tiling.cache_clear()


def aligned() -> tuple[Family, ...]:
    """A library whose kernels for whole lines take every product: alignment costs nothing."""
    lines, *others = FAMILIES
    return replace(lines, least=0), *others


@cache
def tiling(product: Product, device: Device, beside: Beside = PLAIN) -> Tiling:
    """The tiles and the split of the sum that take the least time; larger tiles first."""
    best: Tiling | None = None
    for rows, columns, per_sm in family_of(product).tiles:
        if rows * columns > device.registers_per_sm * 5 // 8:  # accumulators that an SM holds
            continue
        for splits in (s for s in SPLITS if s == 1 or product.k >= s * SPLIT_K):
            made = _timed(product, device, beside, (rows, columns, per_sm), splits)
            if best is None or made.seconds < best.seconds * 0.999:
                best = made
    assert best is not None
    return best


def _timed(product: Product, device: Device, beside: Beside, tile: tuple[int, int, int], splits: int) -> Tiling:
    """One tiling's time, as the event loop will find it: waves of tiles, or the memory."""
    rows, columns, per_sm = tile
    family, lanes = family_of(product), device.simt_flops / device.sms
    down, across = ceil(product.m / rows), ceil(product.n / columns)
    tiles = product.batch * down * across * splits
    depth = ceil(ceil(product.k / splits) / DEPTH) * DEPTH
    share = 1 / (1 + SMALL * (1 / rows + 1 / columns))
    tensor_s = 2.0 * rows * columns * depth / (device.tensor_flops[product.rate_dtype(device)] / device.sms * share)
    store = device.handoff_ops if family.store is None else family.store
    odd = splits == 1 and product.layout == "nt" and (product.pitch or product.n) * product.itemsize % 16 != 0
    lane_s = (store + family.odd_store * odd) * rows * columns / lanes
    lane_s += beside.simt_ops / tiles / lanes
    if family.copies:  # beside the products; columns that are not there are not copied
        copied = (min(rows, product.m) + product.n / across) * product.k / splits
        lane_s += copied / (family.copies * device.clock_hz)
    alone_s = (max if family.copies else sum)((tensor_s, lane_s)) + family.latency_s
    taken = float(tiles * (rows + columns) * depth * product.itemsize)
    multicast = min(MULTICAST, device.largest_cluster) if down * across > 1 else 1
    port_s = (taken / tiles + rows * columns * product.itemsize) / device.sm_bytes_per_s

    def together(ctas: int) -> float:
        return max(alone_s, ctas * tensor_s, ctas * lane_s, ctas * port_s)

    full, rest = divmod(tiles, device.sms * per_sm)
    compute_s = full * together(per_sm) + (together(ceil(rest / device.sms)) if rest else 0.0)
    again = _again(product, device, rows * columns * device.sms * per_sm)
    read, written = beside.distinct(product)
    dram_s = ((read + written) * (1 - beside.cached) + again) / device.dram_bytes_per_s
    partial = product.partial_bytes(splits)
    l2_s = taken / multicast / device.l2_shared_bytes_per_s + (product.result_bytes + partial) / device.l2_bytes_per_s
    memory_s = max(dram_s, l2_s)
    seconds = max(compute_s, memory_s) + APART * min(compute_s, memory_s) + (REDUCE_S if splits > 1 else 0.0)
    return Tiling(
        rows,
        columns,
        splits,
        per_sm,
        tiles,
        tensor_s,
        lane_s - beside.simt_ops / tiles / lanes,
        compute_s,
        memory_s,
        taken,
        multicast,
        read + again,
        seconds,
    )


def _again(product: Product, device: Device, wave: int) -> float:
    """Bytes of operands that DRAM serves more than once.

    CTAs go round panels of one operand, as high as the L2 holds it, or as a square of the ``wave`` of results that are
    made at once; the other operand streams past each panel.
    """
    row = product.k * product.itemsize
    panel = max(PANEL * device.l2_bytes / row, wave**0.5)
    sides = ((product.m, product.n), (product.n, product.m))
    return float(product.batch * row * min((ceil(a / panel) - 1) * b for a, b in sides))

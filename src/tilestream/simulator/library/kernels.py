"""A library's kernels as plain data: what each computes, which values it reads and writes. One model, asked two ways.

``launches`` makes what the event loop runs. ``seconds`` is the closed form of the same stages, microseconds of Python
a kernel: what the planner ranks by. They differ by 1 % on kernels that stream and by 4 % on products, in the mean; of
600 random products by 20 % at most (``tests/simulator/test_library_kernels.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tilestream.devices import Device
from tilestream.simulator.launch import trimmed
from tilestream.simulator.library.gemms import gemm
from tilestream.simulator.library.indexed import Indexed
from tilestream.simulator.library.products import PLAIN, Beside, Product
from tilestream.simulator.library.rows import Rows, eager
from tilestream.simulator.library.stages import launch, one_stage
from tilestream.simulator.library.streams import CTAS_PER_SM, REGISTERS, stream
from tilestream.simulator.tables import compute_s, memory_s
from tilestream.simulator.workload import Engine, SimLaunch, SimStage, TileWork

KEPT = 0.5
"""Of the L2, for values of earlier kernels: the rest holds what streams past."""
PARTS = 8
"""Loads of many CTAs come interleaved, in so many parts: work starts with the first (``simulator.core``)."""


@dataclass(frozen=True)
class Gemm:
    """A matrix product, with what its kernel does beside it; which bytes it moves, the kernel says."""

    product: Product
    beside: Beside = PLAIN


@dataclass(frozen=True)
class Stream:
    """A kernel over ``elements`` as good as Inductor's, in the words of ``streams.stream``. ``touched``: bytes loaded
    counting repeats.

    ``slots``: lane operations that it issues in all; by default those of an elementwise kernel with its arithmetic.
    ``by_index``: tables of which it reads rows, or adds to them, by an index.
    """

    elements: float
    simt_ops: float = 0.0
    sfu_ops: float = 0.0
    slots: float | None = None
    touched: float | None = None
    by_index: tuple[Indexed, ...] = ()


@dataclass(frozen=True)
class Own:
    """One of PyTorch's own kernels (``rows.EAGER``) over ``rows`` of ``features``."""

    kind: str
    rows: float
    features: float
    touched: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Fused attention: ``tiles`` of queries, which read the keys and values of their head through the L2."""

    flops: float
    dtype: str
    tiles: int
    simt_ops: float
    sfu_ops: float
    touched: float


@dataclass(frozen=True)
class Kernel:
    """``work`` on named values, with the distinct bytes that it reads and writes of each. ``ops``: what it is for."""

    name: str
    work: Gemm | Stream | Own | Attention
    reads: tuple[tuple[str, float], ...]
    writes: tuple[tuple[str, float], ...]
    ops: tuple[str, ...] = ()
    source: str = ""

    @property
    def read(self) -> float:
        return sum(size for _, size in self.reads)

    @property
    def written(self) -> float:
        return sum(size for _, size in self.writes)

    @property
    def flops(self) -> float:
        """Of tensor cores."""
        work = self.work
        if isinstance(work, Gemm):
            return work.product.flops + work.beside.more_flops
        return work.flops if isinstance(work, Attention) else 0.0


class Cache:
    """What the L2 holds of the values that were moved last, in bytes, as kernels run one after another."""

    def __init__(self, device: Device) -> None:
        self._room = KEPT * device.l2_bytes
        self._moved = 0.0
        self._last: dict[str, float] = {}

    def share(self, reads: Iterable[tuple[str, float]], writes: Iterable[tuple[str, float]]) -> float:
        """The share of the bytes of ``reads`` that is still there; they and ``writes`` have been moved afterwards."""
        read, touched = dict(reads), {**dict(reads), **dict(writes)}
        own = sum(touched.values())  # the last byte of an operand is read after all before it has been moved
        hits = sum(b for v, b in read.items() if v in self._last and self._moved - self._last[v] + own <= self._room)
        self._moved += own
        self._last |= dict.fromkeys(touched, self._moved)
        return hits / sum(read.values()) if hits else 0.0


def stage_of(kernel: Kernel, device: Device) -> SimStage:
    """The kernel as a stage of the simulator, all its values in DRAM."""
    return replace(_stage(kernel, device), ops=kernel.ops or (kernel.name,), source=kernel.source)


def _stage(kernel: Kernel, device: Device) -> SimStage:
    work, read, written = kernel.work, kernel.read, kernel.written
    if isinstance(work, Gemm):
        beside = replace(work.beside, dram_read=read, dram_write=written)
        return gemm(kernel.name, work.product, device, beside)
    if isinstance(work, Own):
        over = Rows(work.rows, work.features, read, written, work.touched)
        return eager(work.kind, over, device, kernel.name)
    if isinstance(work, Attention):
        return _attention(kernel, work, device)
    return stream(kernel.name, read=read, written=written, device=device, **vars(work))


def launches(kernels: Sequence[Kernel], device: Device, cache: Cache | None = None) -> list[SimLaunch]:
    """The kernels one after another; values that the L2 still holds are not read from DRAM again.

    Args:
        cache: what it holds from before.
    """
    cache = cache or Cache(device)
    return [with_cached(launch(k.name, stage_of(k, device), device), cache.share(k.reads, k.writes)) for k in kernels]


def with_cached(made: SimLaunch, share: float) -> SimLaunch:
    """``made`` with ``share`` of its DRAM reads served by the L2."""
    if not share:
        return made
    stages = tuple(
        replace(
            s,
            work=replace(s.work, dram_read=s.work.dram_read * (1 - share)),
            once=replace(s.once, dram_read=s.once.dram_read * (1 - share)),
        )
        for s in made.stages
    )
    return replace(made, stages=stages)


def seconds(kernels: Sequence[Kernel], device: Device, cache: Cache | None = None) -> float:
    """Seconds of ``launches``, the ways from one to the next included, without the event loop."""
    return sum(closed_form_s(made, device) for made in launches(kernels, device, cache))


def closed_form_s(made: SimLaunch, device: Device) -> float:
    """Seconds of a launch of one stage.

    Waves of tiles, each as long as a CTA's own or as the busiest pipe of an SM is with all of its CTAs; or the ports,
    the L2, the DRAM. What stands before them or behind them alone: the launch, first loads, the work on the last.
    """
    stage = trimmed(made.stages[0])
    tensor, simt = compute_s(stage.work, device)
    load, store = memory_s(stage.work, device)
    own = (max if stage.overlap else sum)((tensor, simt)) + stage.work.latency_s
    ctas, on_sm = stage.ctas, ceil(stage.tiles / min(device.sms, stage.ctas))

    def together(resident: int) -> float:
        return max(own, resident * max(tensor, simt))

    full, rest = divmod(stage.tiles, ctas)
    busiest = ceil(ctas / device.sms)
    waves = full * together(busiest) + (together(ceil(rest / device.sms)) if rest else 0.0)
    dram, l2, port = load + store
    first = max(load[0] * ctas, load[1] * ctas, load[2] * busiest) / PARTS
    memory = max(dram * stage.tiles, l2 * stage.tiles, port * on_sm) + own / PARTS
    once = sum(compute_s(stage.once, device)) + stage.once.latency_s
    start = device.launch_s if made.launch_s is None else made.launch_s
    return float(start + once + max(waves + first, memory))


def _attention(kernel: Kernel, work: Attention, device: Device) -> SimStage:
    ctas = min(work.tiles, CTAS_PER_SM * device.sms)
    whole = TileWork(
        tensor_flops=work.flops,
        dtype=work.dtype if work.dtype in device.tensor_flops else "bf16",
        simt_ops=work.simt_ops,
        sfu_ops=work.sfu_ops,
        l2_read=max(kernel.read, work.touched),
        l2_write=kernel.written,
        dram_read=kernel.read,
        dram_write=kernel.written,
    )
    return one_stage(kernel.name, Engine.TENSOR, work.tiles, ctas, REGISTERS, whole)

"""PyTorch's own kernels that reduce, look up, scatter and concatenate. What they issue bounds them, not what they move.

LayerNorm and lookups have a CTA a row, sums over rows walk down a column in few CTAs, index_add is an atomic an
element, gradients of lookups sort, and ``cat`` of odd widths divides for every element. Inductor's versions of most of
these stream (``stream``). Two that are not PyTorch's stand beside them: the sort of an index and the sum of rows in its
order, which replace scatters (``plan.messages``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device
from tilestream.simulator.library.streams import stream
from tilestream.simulator.workload import SimStage


@dataclass(frozen=True)
class Rows:
    """What a kernel goes over: ``rows`` of ``features``, distinct bytes from and to DRAM, bytes loaded with repeats."""

    rows: float
    features: float
    read: float
    written: float
    touched: float = 0.0

    @property
    def elements(self) -> float:
        return self.rows * self.features


@dataclass(frozen=True)
class Slots:
    """Issue slots of all lanes of an SM: a row and an element; ``wide`` an element where rows exceed ``widest``.

    ``serial`` cycles a row pass in a CTA that walks down rows. It walks down ``walks`` at most: more are shared out and
    added up afterwards, or ``streams`` says that the kernel for more rows streams. ``start_s``: sorts and further
    kernels, whatever the size.
    """

    row: float = 0.0
    element: float = 0.0
    wide: float | None = None
    widest: float = 1024.0
    serial: float = 0.0
    walks: int = 131_072
    streams: bool = False
    start_s: float = 0.0

    def walked(self, rows: float) -> float:
        """Rows that one CTA walks down, one after another."""
        parts = ceil(rows / self.walks)
        return 0.0 if self.streams and parts > 1 else rows / max(1, parts)


EAGER: dict[str, Slots] = {
    "layer_norm": Slots(row=24_800.0, element=38.0),
    "softmax": Slots(element=44.0, wide=80.0),
    "softmax_backward": Slots(element=87.0),
    "sum_features": Slots(element=27.0, wide=16.0, widest=511.0),
    "sum_rows": Slots(element=19.0, serial=1.2, start_s=5.4e-6),
    "norm_sums": Slots(element=9.5, serial=4.4, walks=65_536, streams=True),
    "table_gradient": Slots(serial=41.0),
    "table_gradient sorted": Slots(element=367.0, start_s=87e-6),
    "index_gradient": Slots(element=10_200.0, start_s=98e-6),
    "lookup": Slots(row=16_900.0),
    "lookup_elements": Slots(element=102.0),
    "bag": Slots(row=35_700.0),
    "scatter_add": Slots(element=225.0),
    "scatter_elements": Slots(element=102.0),
    "scatter_fill": Slots(element=73.0),
    "scatter_reduce": Slots(element=159.0),
    "sort": Slots(element=590.0, start_s=28e-6),
    "segment_sum": Slots(element=18.0),
    "cat": Slots(element=13.0),
    "cat odd": Slots(element=48.0),
}
"""By kind of kernel. ``norm_sums``: gradients of a LayerNorm's vectors. ``table_gradient``: of an embedding, up to
``SORTED`` lookups; ``index_gradient``: of ``x[index]``, by elements. ``cat odd``: a part has rows that are no multiple
of 16 bytes. ``sort`` (an element an edge) and ``segment_sum`` are ours: sorts are fitted to
benchmarks/results/sorted_keys.json, sums to the four cases of docs/message-passing.md, 7 to 37 % off."""

SORTED = 3072
"""Lookups beyond which an embedding's gradient is made of sorted indices."""


def eager(kind: str, over: Rows, device: Device, name: str = "", *, cached: float = 0.0) -> SimStage:
    """One of ``EAGER``'s kernels.

    Args:
        cached: share of its bytes that the L2 holds from before and keeps.
    """
    cost = EAGER[kind]
    each = cost.wide if cost.wide is not None and over.features > cost.widest else cost.element
    moved_s = (over.read + over.written) * (1 - cached) / device.dram_bytes_per_s
    serial_s = cost.start_s + cost.walked(over.rows) * cost.serial / device.clock_hz
    return stream(
        name or kind,
        over.elements,
        over.read,
        over.written,
        device,
        touched=over.touched,
        slots=cost.row * over.rows + each * over.elements,
        latency_s=max(cost.start_s, serial_s - moved_s),
        cached=cached,
    )

"""PyTorch's own kernels that reduce, look up, scatter and concatenate. What they issue bounds them, not what they move.

LayerNorm and lookups have a CTA a row, sums over rows walk down a column in few CTAs, index_add is an atomic an
element, and ``cat`` of odd widths divides for every element. Inductor's versions of these stream (``stream``).
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
    aligned: bool = True

    @property
    def elements(self) -> float:
        return self.rows * self.features


@dataclass(frozen=True)
class Slots:
    """Issue slots of all lanes of an SM: a row and an element; ``wide`` an element where rows exceed ``widest``.

    ``serial`` cycles a row pass in every CTA, one row after another, of at most ``SERIAL_ROWS`` rows.
    """

    row: float = 0.0
    element: float = 0.0
    wide: float | None = None
    widest: float = 1024.0
    serial: float = 0.0
    start_s: float = 0.0


SERIAL_ROWS = 131_072
"""Rows of a sum over rows that one CTA walks down; more are shared out and added up afterwards."""

EAGER: dict[str, Slots] = {
    "layer_norm": Slots(row=24_800.0, element=38.0),
    "softmax": Slots(element=44.0, wide=80.0),
    "sum_features": Slots(element=27.0, wide=16.0, widest=511.0),
    "sum_rows": Slots(element=19.0, serial=1.2, start_s=5.4e-6),
    "lookup": Slots(row=16_900.0),
    "bag": Slots(row=35_700.0),
    "scatter_add": Slots(element=225.0),
    "cat": Slots(element=13.0),
    "cat odd": Slots(element=48.0),
}
"""By kind of kernel. ``cat odd``: a part whose rows are no multiple of 16 bytes."""


def eager(kind: str, over: Rows, device: Device, name: str = "", *, cached: float = 0.0, **told: object) -> SimStage:
    """One of ``EAGER``'s kernels.

    Args:
        cached: share of its bytes that the L2 holds from before and keeps.
        told: ``ops`` and ``source``, as ``stream`` has them.
    """
    cost = EAGER[kind]
    each = cost.wide if cost.wide is not None and over.features > cost.widest else cost.element
    walked = over.rows / ceil(over.rows / SERIAL_ROWS)
    moved_s = (over.read + over.written) * (1 - cached) / device.dram_bytes_per_s
    serial_s = cost.start_s + walked * cost.serial / device.clock_hz
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
        **told,  # pyright: ignore[reportArgumentType]
    )

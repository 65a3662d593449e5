"""What DRAM delivers of tensors whose rows are read, or added to, by an index: what the L2 keeps comes once.

Indices are taken to be spread evenly and independent of each other, as those of a graph in no order are: sorted ones
are read with fewer misses.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilestream.devices import Device
from tilestream.ir.axes import View
from tilestream.ir.pipeline import ELEMENT_BYTES, Pipeline
from tilestream.simulator.library.kernels import KEPT


def by_index(p: Pipeline, view: View, size: Mapping[str, int], device: Device) -> tuple[float, float]:
    """Bytes of a tensor under ``view``: of all that is meant, each first time, and again for what the L2 no longer has;
    without an index all of it comes once.

    Of N rows, E draws touch N (1 - (1 - 1/N)^E); a row that was touched before is still in the L2 with the share of the
    table that half of the L2 holds.
    """
    tensor = p.tensor(view.of)
    each = ELEMENT_BYTES[tensor.dtype]
    whole = float(prod(size[a.name] for a in tensor.axes) * each)
    rows = prod(size[a.name] for at, a in zip(view.at or (), tensor.axes, strict=True) if at.index)
    if rows == 1:
        return whole, 0.0
    touched = float(prod(size[a] for a in view.axes) * each)
    first = whole * (1.0 - (1.0 - 1.0 / rows) ** (touched / (whole / rows)))
    kept = min(1.0, KEPT * device.l2_bytes / whole)
    return first, max(0.0, touched - first) * (1.0 - kept)

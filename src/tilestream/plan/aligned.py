"""Which products of a row stream read copies of their rows, padded to 16 bytes: where that is predicted to pay."""

from __future__ import annotations

from math import ceil

from torch import fx

from tilestream.devices import Device
from tilestream.graph.live import storage
from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.aligned_rows import PER_16_BYTES, missing
from tilestream.graph.sizes import hint
from tilestream.ir.pipeline import TILE_ROWS
from tilestream.kernels.stream.input_ring import odd_chunk_s
from tilestream.plan import margins

CHUNK_COLUMNS = 8 * PER_16_BYTES
"""Of 16 bits. Rows of more, element by element, are what a loader warp takes longest for."""


def aligns(node: fx.Node, device: Device) -> bool:
    """Whether the rows of ``node``, a product, are to be copied: the user's own, 16 bits an element, so wide that a
    loader warp scatters them, or such that lie transposed and are copied anyway; and the copy is predicted to take far
    less than loader warps would.
    """
    rows, turned = node.args[-2:]
    if not isinstance(rows, fx.Node) or not isinstance(turned, fx.Node) or packet(turned) is not aten.t:
        return False
    given, made = rows.meta["val"], node.meta["val"]
    columns, width = given.shape[-1], made.shape[-1]
    known = isinstance(columns, int) and isinstance(width, int) and max(columns, width) <= MAX_FEATURES
    if not known or given.element_size() != 2 or not missing(columns) or storage(rows).op != "placeholder":
        return False
    if columns <= CHUNK_COLUMNS and given.stride(-1) == 1:
        return False
    count = hint(given.shape[0])
    chunks = (min(CHUNK_COLUMNS, columns - first) for first in range(0, columns, CHUNK_COLUMNS))
    waits = ceil(count / TILE_ROWS / (2 * device.sms)) * sum(odd_chunk_s(2, columns, valid) for valid in chunks)
    moved = 2 * count * (2 * columns + missing(columns))
    return device.launch_s + device.ramp_s + moved / device.dram_bytes_per_s < margins.COPIED * waits

"""What a decode step as one kernel is predicted to take."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.kernels.step.shape import Shape

HAND_OVER_US = 2.8
"""Until all CTAs have what others computed: a prototype's matrix-vector products of 30 layers took 338 to 369 us on an
H100, whatever was loaded ahead."""


def predicted_us(shape: Shape, device: Device) -> float:
    """Microseconds of a step: weights come from memory while nobody waits, or hand-overs take longer than they do.

    A layer's weights are on their way during its hand-overs, so the longer of the two counts; the head's come alone.
    """
    head = 2 * shape.vocabulary * shape.width
    weights, last = (1e6 * n / device.dram_bytes_per_s for n in (shape.weight_bytes - head, head))
    return max(weights, HAND_OVER_US * shape.hand_overs) + last

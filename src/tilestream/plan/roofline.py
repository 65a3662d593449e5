"""A roofline of the time of what is left of a graph: kernels of libraries and of Inductor, one after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilestream.devices import Device
from tilestream.graph.kernels import Kernel


def time_us(kernels: Iterable[Kernel], device: Device, tf32: bool | None = None) -> float:
    """Microseconds, one kernel after another.

    Args:
        tf32: whether tensor cores take float32 products; by default as ``torch.get_float32_matmul_precision`` says.
    """
    if tf32 is None:
        tf32 = torch.get_float32_matmul_precision() != "highest"
    seconds = 0.0
    for kernel in kernels:
        memory_s = kernel.bytes / device.dram_bytes_per_s
        seconds += device.launch_s
        if not kernel.flops:
            seconds += memory_s
            continue
        # A lane's FMA is two FLOPs, as in the count.
        on_lanes = kernel.dtype not in device.tensor_flops or (kernel.dtype == "f32" and not tf32)
        rate = 2 * device.simt_flops if on_lanes else device.tensor_flops[kernel.dtype]
        seconds += device.load_s + device.library_share * (memory_s + kernel.flops / rate)
    return seconds * 1e6

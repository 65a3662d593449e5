"""Products of odd widths that are padded to whole lines of 16 bytes: by Inductor (its pass ``pad_mm``), by its own
comparison, and by a copy of ours.

Of products that the tensor cores bound, it times the padded one with the copies of its operands, and takes it where it
wins by a tenth. Its timing launches kernels from Python. In the graph the copy of the activations is one kernel, with
what lies before it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.simulator.library.kernels import Gemm, Kernel, Stream
from tilestream.simulator.library.products import PLAIN, Product, tiling

LINE = 16
WINS = 1.1
"""How much longer than the padded one the product itself must take."""
FROM_PYTHON_S = 5e-6
"""Of a kernel that PyTorch launches outside of a CUDA graph; an assumption."""
COPIES = 4
"""Kernels that pad two operands: a fill and a copy each."""


def as_inductor_runs(kernel: Kernel, device: Device) -> tuple[Kernel, ...]:
    """``kernel`` itself, or the copy that pads its operands and the padded product."""
    work = kernel.work
    if not isinstance(work, Gemm) or work.product.batch > 1 or not _pays(work.product, device):
        return (kernel,)
    wide = padded(work.product)
    name, size = kernel.reads[0]
    copied = (f"{kernel.name}.padded", float(wide.m * wide.k * wide.itemsize))
    copy = Kernel(f"{kernel.name}.pad", Stream(float(wide.m * wide.k)), ((name, size),), (copied,), ("pad",))
    return (copy, replace(kernel, work=replace(work, product=wide), reads=(copied, *kernel.reads[1:])))


def behind_copies(kernel: Kernel) -> tuple[Kernel, Kernel]:
    """One kernel of ours that copies both operands of a product, the largest that it reads, with zeros behind their
    columns (``graph.rewrites.operators``), and the padded product."""
    assert isinstance(kernel.work, Gemm)
    wide = padded(kernel.work.product)
    odd = sorted(kernel.reads, key=lambda read: read[1])[-2:]
    others = tuple(read for read in kernel.reads if read not in odd)
    grown = wide.k / kernel.work.product.k
    copied = tuple((f"{name}.padded", size * grown) for name, size in odd)
    elements = float((wide.m + wide.n) * wide.k)
    copies = Kernel(f"{kernel.name}.pad", Stream(elements), tuple(odd), copied, ("pad",), kernel.source)
    return copies, replace(kernel, work=replace(kernel.work, product=wide), reads=(*copied, *others))


def padded(product: Product) -> Product:
    """With rows of both operands and of the result that are multiples of ``LINE`` bytes."""
    each = LINE // product.itemsize
    m = each * ceil(product.m / each) if product.layout == "tn" else product.m
    return replace(product, m=m, n=each * ceil(product.n / each), k=each * ceil(product.k / each))


def _pays(product: Product, device: Device) -> bool:
    if replace(product, pitch=0).aligned >= LINE:
        return False
    moved_s = (product.operand_bytes + product.result_bytes) / device.dram_bytes_per_s
    if product.flops / device.tensor_flops[product.rate_dtype(device)] < moved_s:
        return False
    wide = padded(product)
    copies_s = max(COPIES * FROM_PYTHON_S, 3 * wide.operand_bytes / device.dram_bytes_per_s)
    return tiling(product, device, PLAIN).seconds > WINS * (tiling(wide, device, PLAIN).seconds + copies_s)

"""Kernels of libraries as stages of the simulator, from plain numbers: shapes, dtypes and a device.

``gemm`` (cuBLAS), ``stream`` (elementwise kernels, and reductions as good as Inductor's) and ``eager`` (PyTorch's own
reductions, lookups, scatters and concatenations, which are far from the memory's rate). ``launch`` makes one of them a
launch of its own. ``Kernel`` is one of them as data, with the values that it reads and writes. Constants were fitted on
kernels of one H200: docs/truth.md says on which, and how far off they are.
"""

from tilestream.simulator.library.bulk import kernels as bulk_kernels
from tilestream.simulator.library.gemms import gemm
from tilestream.simulator.library.indexed import Indexed
from tilestream.simulator.library.kernels import (
    Attention,
    Cache,
    Gemm,
    Kernel,
    Own,
    Stream,
    closed_form_s,
    launches,
    seconds,
    stage_of,
    with_cached,
)
from tilestream.simulator.library.padding import as_inductor_runs
from tilestream.simulator.library.products import Beside, Product, tiling
from tilestream.simulator.library.rows import EAGER, Rows, eager
from tilestream.simulator.library.stages import launch, merge
from tilestream.simulator.library.streams import lane_ops, stream

__all__ = [
    "EAGER",
    "Attention",
    "Beside",
    "Cache",
    "Gemm",
    "Indexed",
    "Kernel",
    "Own",
    "Product",
    "Rows",
    "Stream",
    "as_inductor_runs",
    "bulk_kernels",
    "closed_form_s",
    "eager",
    "gemm",
    "lane_ops",
    "launch",
    "launches",
    "merge",
    "seconds",
    "stage_of",
    "stream",
    "tiling",
    "with_cached",
]

"""What kernels of segments reach of an H200's rates and latencies.

``python -m benchmarks.fit.fit_segments`` fits what is marked so to the even kernels of two sets of
``benchmarks.lib.fresh_ragged`` in ``benchmarks/results/ragged_kernels.json``, uniform graphs left out. What is not
fitted was chosen with these and the odd ones in view
([docs/simulator.md](../../../../docs/simulator.md#ragged-pipelines)). All are shares of what the device's description
says, so that they move with it to devices that were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coefficients:
    """Shares, but for ``opened``, of an H200."""

    launch: float = 0.46
    """Of ``launch_s``: such a kernel starts while the one in front of it ends. Fitted."""
    visit: float = 0.98
    """Of ``load_s``: what a node waits for besides its edges: bounds, its first indices, its rows. Fitted."""
    batch: float = 0.56
    """Of ``again_s``: what a batch of edges waits for its indices and then for rows from the L2. Fitted."""
    from_dram: float = 0.57
    """Of ``load_s``: what is added where all rows come from DRAM. Fitted."""
    issued: float = 0.73
    """Of the lanes' and the special function units' rate, that warps which wait now and then reach. Fitted."""
    gathered: float = 1.51
    """Of the L2's rate for queues, what rows at random places come at. Fitted."""
    held: float = 0.5
    """Of the L2, what holds rows that all SMs read: each half has its own copy for the SMs at its side. By hand."""
    opened: float = 64.0
    """Bytes that DRAM could give in a row while it opens one at a random place: a burst. By hand."""


H200_SEGMENTS = Coefficients()

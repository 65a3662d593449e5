"""Few rows: one tile of rows shared by the whole grid, one layer or a feed-forward block of two divided over it.

``build`` turns a stage in plain form into a ``SharedTile``: which CTA makes which columns of the middle and of the
results, what is exchanged and how, and the rings of shared memory. The kernels, the cost model and the planner read it.
"""

from __future__ import annotations

from tilestream.kernels.product.shared_tile.model import SharedTile, Tail, build

__all__ = ["SharedTile", "Tail", "build"]

"""CUDA of shared tiles: a feed-forward block on few rows, one tile over the whole grid."""

from __future__ import annotations

from tilestream.cuda.shared_tile.emit import SharedTileSource, emit

__all__ = ["SharedTileSource", "emit"]

"""CUDA of tiled blocks: a feed-forward block on many rows, both products as tiles dealt over the grid."""

from __future__ import annotations

from tilestream.cuda.tiled_block.emit import TiledBlockSource, emit

__all__ = ["TiledBlockSource", "emit"]

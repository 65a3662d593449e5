"""Tiles of 128 rows dealt over the grid: both products of a feed-forward block, or one layer, on many rows."""

"""Tiles of one or two products over the grid: on few rows (shared tile) and on many (tiled block)."""

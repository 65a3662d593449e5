"""Ragged regions: gathers, what is computed of each edge, reductions at nodes, and what follows there."""

from tilestream.graph.ragged.region import ragged_regions

__all__ = ["ragged_regions"]

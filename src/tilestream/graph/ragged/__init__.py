"""Ragged regions: gathers, what is computed of each edge, reductions at nodes, and what follows there."""

from tilestream.graph.ragged.edge_networks import edge_networks
from tilestream.graph.ragged.region import ragged_regions

__all__ = ["edge_networks", "ragged_regions"]

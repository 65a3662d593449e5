"""What single nodes are, before any grouping: what the finders of regions, blocks and wide layers look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from tilestream.graph.lowering import Value
from tilestream.kernels.product.block import MOST_ROWS


@dataclass
class Facts:
    """Of nodes, some up to the features of a region's tiles, some of layers of any width.

    Attributes:
        known: the values of those that may be in a region.
        tiles, parameters: their operands that stream by rows, and the others.
        reasons: why nodes stay out.
        kinds: of the tile ops that a node becomes.
    """

    known: dict[fx.Node, Value] = field(default_factory=dict)
    tiles: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    parameters: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    kinds: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)

    def rows(self, node: fx.Node) -> int:
        """How many rows a node has; 0 where that is not known."""
        rows = self.known[node].rows if node in self.known else None
        return int(rows) if rows is not None and rows.is_Integer else 0

    def few(self, node: fx.Node) -> bool:
        """Whether a tile has so few rows, known now, that CTAs should share them."""
        return 0 < self.rows(node) <= MOST_ROWS

    def width(self, node: fx.Node) -> int:
        """Features of a node's tile."""
        return self.known[node].tile.features

"""A region: statements that became one stream graph, with what it reads and makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilestream.sparse.einsum import Statement
from tilestream.sparse.fusion import Fused, Leaf
from tilestream.sparse.lowering.tiles import Edge, from_tiles
from tilestream.sparse.storage import Format, SparseTensor
from tilestream.sparse.stream.graph import Graph
from tilestream.sparse.table import FusionTable

Source = str | int | Edge
"""A tensor's name; or the size of a full range, or an index's edge, which stand for no tensor."""


@dataclass(frozen=True)
class Region:
    """Statements that became one stream graph.

    Attributes:
        einsums: the statements, in program order.
        table: the fusion table.
        inputs: by the name that the graph uses, the tensor it is a view of and the view's format; a full range of an
            index (``range_i``) stands for no tensor and has its size instead of a name, the tiles of one that blocks do
            not divide (``edge_i``) its ``Edge``.
        outputs: shape and format of each result.
        order: the global order of its indices.
        orders: the topological orders that were looked at.
        fills: what an output does not store stands for, where that is not 0.
        notes: what the compiler decided and why (copies in another order, results sent through memory).
        source: the user's lines.
        fused: the trees of views that were lowered, and ``views``: name and format of each of their leaves.
        scalars: of a blocked result, the dimension that each stored one is, and the format with blocks opened.
    """

    name: str
    einsums: tuple[Statement, ...]
    table: FusionTable
    graph: Graph
    inputs: Mapping[str, tuple[Source, Format]]
    outputs: Mapping[str, tuple[tuple[int, ...], Format]]
    order: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...] = ()
    fills: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = ""
    scalars: Mapping[str, tuple[tuple[int | None, ...], Format]] = field(default_factory=dict)
    fused: Fused | None = field(default=None, repr=False)
    views: Mapping[Leaf, tuple[str, Format]] = field(default_factory=dict, repr=False)

    def results(
        self, outputs: Mapping[str, SparseTensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, SparseTensor]:
        """Results of the graph as the program keeps them: blocks opened, dimensions in order."""
        made = dict(outputs)
        for name, (dims, format) in self.scalars.items():
            made[name] = from_tiles(outputs[name], dims, shapes[name], format)
        return made

    def __str__(self) -> str:
        lines = [f"region {self.name}: order {' '.join(self.order) or '(none)'}"]
        lines += [f"  {statement}" for statement in self.einsums]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

"""Rows of a table that an index names: ``x[index]``, ``index_select``, ``embedding``."""

from __future__ import annotations

from torch import fx

from tilestream.graph.lowering import Emitter, dtype_of
from tilestream.graph.nodes import GATHERS, Unsupported, argument, aten, integer, packet, tensor_of, value
from tilestream.graph.operators.rules import rule
from tilestream.graph.sizes import settled
from tilestream.ir.dtypes import INDEX_DTYPES
from tilestream.ir.pipeline import DTYPE_BYTES, Tile

_INDEX_NAMES = {dtype: name for name, dtype in INDEX_DTYPES.items()}


@rule(*GATHERS)
def gather(e: Emitter, node: fx.Node) -> Tile:
    """A load of rows through an index, which may have any number of dimensions.

    Raises:
        Unsupported: it takes something else than rows of a matrix, or rows that kernels cannot copy.
    """
    table, index = table_and_index(node)
    fake, names = tensor_of(table), tensor_of(index)
    if names.dtype not in _INDEX_NAMES:
        raise Unsupported(f"an index of {str(names.dtype).removeprefix('torch.')}: int64 and int32 name rows")
    if fake.dim() != 2:
        raise Unsupported(f"gathers from {fake.dim()} dimensions: only rows of a matrix can be taken")
    if names.dim() == 0:
        raise Unsupported("takes one row: nothing streams")
    width, height = settled(fake.shape[1]), settled(fake.shape[0])
    if not isinstance(width, int):
        raise Unsupported("the feature dimension is dynamic")
    row = width * DTYPE_BYTES[dtype_of(table)]
    if row % 16:
        raise Unsupported(f"gathers rows of {row} bytes: only multiples of 16 are copied")
    return e.gathered(table, height if isinstance(height, int) else None, width, index, _INDEX_NAMES[names.dtype])


def table_and_index(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What rows are taken of, and through what.

    Raises:
        Unsupported: it takes something else than rows by one tensor.
    """
    table: object = node.args[0]
    index: object = argument(node, 1, "indices")
    if packet(node) is aten.index_select:
        fake = value(table)
        if fake is None or integer(node, 1, "dim") % max(1, fake.dim()):
            raise Unsupported("gathers along another dimension than rows")
        index = argument(node, 2, "index")
    if isinstance(index, list | tuple):
        if len(index) != 1:
            raise Unsupported("gathers by several indices")
        index = index[0]
    if not isinstance(table, fx.Node) or not isinstance(index, fx.Node) or value(index) is None:
        raise Unsupported("gathers by something else than one tensor")
    return table, index

"""Passes: one file, one function, Pipeline in and Pipeline out. ``plan.recipes`` lists their order."""

from tilestream.plan.passes.activation_in_product import activation_in_product
from tilestream.plan.passes.balance import balance
from tilestream.plan.passes.choose_in_flight import choose_in_flight
from tilestream.plan.passes.choose_placement import choose_placement
from tilestream.plan.passes.choose_residency import choose_residency
from tilestream.plan.passes.chunk_hidden import chunk_hidden
from tilestream.plan.passes.cut_vertical import cut_vertical
from tilestream.plan.passes.divide_columns import divide_columns
from tilestream.plan.passes.hold_columns import hold_columns
from tilestream.plan.passes.load_directly import load_directly
from tilestream.plan.passes.merge_common_ops import merge_common_ops
from tilestream.plan.passes.order_memory_ops import order_memory_ops
from tilestream.plan.passes.remove_dead_ops import remove_dead_ops
from tilestream.plan.passes.set_queue_depth import set_queue_depth
from tilestream.plan.passes.share_tile import share_tile
from tilestream.plan.passes.split_bulk import split_bulk
from tilestream.plan.passes.split_columns import split_columns
from tilestream.plan.passes.split_spatial import split_spatial
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.passes.weigh_by_softmax import weigh_by_softmax

__all__ = [
    "activation_in_product",
    "balance",
    "choose_in_flight",
    "choose_placement",
    "choose_residency",
    "chunk_hidden",
    "cut_vertical",
    "divide_columns",
    "hold_columns",
    "load_directly",
    "merge_common_ops",
    "order_memory_ops",
    "remove_dead_ops",
    "set_queue_depth",
    "share_tile",
    "split_bulk",
    "split_columns",
    "split_spatial",
    "tile_block",
    "weigh_by_softmax",
]

"""One list of all rewrites of ATen graphs, by name, in the order in which they run; and what runs them.

Every graph is functional: AOTAutograd has removed mutations, and decomposed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import fx

from tilestream.graph.rewrites.aligned_rows import align_rows, unalign_rows
from tilestream.graph.rewrites.bags import open_bags
from tilestream.graph.rewrites.broadcasts import put_off_expands
from tilestream.graph.rewrites.complex_products import multiply_reals
from tilestream.graph.rewrites.derivatives import save_derivatives
from tilestream.graph.rewrites.epilogues import fuse_activations
from tilestream.graph.rewrites.gelus import join_gelus
from tilestream.graph.rewrites.joint import narrow_products, split_joined
from tilestream.graph.rewrites.kept import keep_lists
from tilestream.graph.rewrites.late_products import multiply_late
from tilestream.graph.rewrites.masked_edges import keep_masked_edges
from tilestream.graph.rewrites.maxima import join_maxima, split_maxima
from tilestream.graph.rewrites.norm_sums import join_norm_gradients, join_wide_norms
from tilestream.graph.rewrites.normal_form import (
    copy_views,
    fold_batches,
    join_biases,
    open_factors,
    remove_dead,
    split_to_slices,
    squeeze_out_of_place,
    unlift_constants,
)
from tilestream.graph.rewrites.norms import open_norms
from tilestream.graph.rewrites.padded_products import pad_products
from tilestream.graph.rewrites.patches import multiply_patches
from tilestream.graph.rewrites.pixels import from_pixels, to_pixels
from tilestream.graph.rewrites.routing import count_small_keys
from tilestream.graph.rewrites.row_gathers import take_rows
from tilestream.graph.rewrites.row_sums import copy_sums_operands
from tilestream.graph.rewrites.segment_reductions import open_jagged, open_segments
from tilestream.graph.rewrites.settings import DEFAULT, Settings
from tilestream.graph.rewrites.shared_keys import share_keys
from tilestream.graph.rewrites.sorted_sums import sort_sums
from tilestream.graph.rewrites.states import write_together


class When(Enum):
    """Where in a compilation a graph is rewritten."""

    JOINT = "forward and backward in one, before they are cut apart"
    SUMS = "an inference graph, before its normal form"
    BACKWARD = "a backward graph, before its normal form"
    NORMAL_FORM = "any graph, before its regions are selected"
    CONVOLUTIONS = "an inference graph in its normal form, unless the user streams no convolutions"
    ROWS = "an inference graph in its normal form, before its regions are selected"
    PLACED = "a graph whose regions are calls: what none of them took is as it was"
    AROUND = "any graph with regions, before it is decomposed for Inductor"
    AROUND_INFERENCE = "the same, if nothing is trained"
    CALLED = "an inference or a forward graph, whose arguments are those of a call, behind all others"


Run = Callable[[fx.Graph, Settings], int]
"""Changes a graph with ``val`` in its nodes' ``meta`` in place; how much it changed. New nodes have values as well.
Nodes that nobody reads any more may stay."""


@dataclass(frozen=True)
class Rewrite:
    """``run`` is known by its name; ``purpose``: what its result is good for."""

    run: Run
    when: tuple[When, ...]
    purpose: str

    @property
    def name(self) -> str:
        return self.run.__name__


REWRITES = (
    Rewrite(take_rows, (When.JOINT, When.SUMS), "an index is saved and read once a row, and not once an element"),
    Rewrite(keep_masked_edges, (When.JOINT, When.SUMS), "the host need not wait for how many edges a mask selects"),
    Rewrite(
        split_joined, (When.JOINT,), "rows that were joined need not be saved: a weight's gradient takes the parts"
    ),
    Rewrite(
        multiply_late, (When.JOINT,), "gradients of gathered rows are multiplied at nodes, of which there are fewer"
    ),
    Rewrite(pad_products, (When.AROUND_INFERENCE,), "fast kernels of libraries want rows of 16 bytes"),
    Rewrite(join_norm_gradients, (When.AROUND,), "the same of norms that no region has taken in"),
    Rewrite(
        fuse_activations, (When.AROUND,), "activations cost nothing, or little, as epilogues of a library's products"
    ),
    Rewrite(open_bags, (When.JOINT, When.SUMS), "rows of a bag are added up where they are read, and never written"),
    Rewrite(open_segments, (When.JOINT, When.SUMS), "rows are made where they are reduced, and never written"),
    Rewrite(open_jagged, (When.SUMS,), "rows of jagged tensors are reduced as they lie, and not padded first"),
    Rewrite(count_small_keys, (When.JOINT, When.SUMS), "a router's choice of experts is sorted by its few bits"),
    Rewrite(sort_sums, (When.JOINT, When.SUMS), "messages are summed in sorted order, without atomics"),
    Rewrite(multiply_patches, (When.JOINT,), "cuDNN turns pictures, and takes long for the gradient of their weight"),
    Rewrite(save_derivatives, (When.JOINT,), "what is behind a product in the backward graph is one multiplication"),
    Rewrite(join_wide_norms, (When.JOINT,), "rows of a norm's gradients are read once, not for each of them"),
    Rewrite(open_norms, (When.JOINT,), "the derivative of a norm is part of the chain of rows around it"),
    Rewrite(put_off_expands, (When.JOINT,), "a column is not held as rows that repeat it"),
    Rewrite(narrow_products, (When.BACKWARD,), "columns that nobody reads are not computed"),
    Rewrite(copy_sums_operands, (When.BACKWARD,), "sums over rows read what is in memory anyway"),
    Rewrite(remove_dead, (When.NORMAL_FORM,), "what nobody reads is in no region"),
    Rewrite(unlift_constants, (When.NORMAL_FORM,), "a constant is an operand, and no copy of one"),
    Rewrite(fold_batches, (When.NORMAL_FORM,), "a layer over rows that do not lie one behind the other is a layer"),
    Rewrite(join_biases, (When.NORMAL_FORM,), "a product with its bias is one operator, and may have an epilogue"),
    Rewrite(
        join_gelus, (When.NORMAL_FORM,), "one operator is an epilogue, of a kernel of ours or of a library's product"
    ),
    Rewrite(open_factors, (When.NORMAL_FORM,), "a sum of two numbers is no launch of its own"),
    Rewrite(split_to_slices, (When.NORMAL_FORM,), "every part of a split lies inside or outside a region by itself"),
    Rewrite(split_maxima, (When.NORMAL_FORM,), "the maximum over 16 rows is an epilogue of their linear layer"),
    Rewrite(squeeze_out_of_place, (When.NORMAL_FORM,), "a view can be copied"),
    Rewrite(copy_views, (When.NORMAL_FORM,), "every use of a view lies inside or outside a region by itself"),
    Rewrite(to_pixels, (When.CONVOLUTIONS,), "convolutions are layers on rows of channels"),
    Rewrite(write_together, (When.ROWS,), "states of a recurrent model are written by one launch, and read by rows"),
    Rewrite(align_rows, (When.ROWS,), "rows come by bulk copies, where loader warps would take longer than a copy"),
    Rewrite(unalign_rows, (When.PLACED,), "undoes align_rows"),
    Rewrite(join_maxima, (When.PLACED,), "undoes split_maxima"),
    Rewrite(from_pixels, (When.PLACED,), "undoes to_pixels"),
    Rewrite(multiply_reals, (When.AROUND_INFERENCE,), "Inductor fuses products of complex numbers"),
    Rewrite(keep_lists, (When.CALLED,), "a later call with the same list of edges need not sort it"),
    Rewrite(share_keys, (When.AROUND_INFERENCE,), "keys and values are not repeated for queries that share them"),
)


def rewrite(owner: fx.GraphModule, which: When | Run, settings: Settings = DEFAULT) -> int:
    """Run all rewrites of a place in a compilation, or a single one, on a graph in place; how much they changed.

    Raises:
        RuntimeError: a rewrite left what is no graph: a mistake of ours.
    """
    runs = [each.run for each in REWRITES if which in each.when] if isinstance(which, When) else [which]
    made = 0
    for run in runs:
        if changed := run(owner.graph, settings):
            owner.graph.eliminate_dead_code()
            check(owner.graph, run)
            made += changed
    if made:
        owner.recompile()
    return made


def check(graph: fx.Graph, run: Run) -> None:
    """Raise if ``run`` left what is no graph. Tests hold the values of new nodes against their operators as well."""
    graph.lint()

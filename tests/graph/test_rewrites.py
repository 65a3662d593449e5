"""The table of rewrites: all of them are in it, in their order, and what they leave is a graph with values."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from eager_regions import trace
from torch import Tensor, fx

from tilestream.graph import rewrites
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import REWRITES, When, rewrite

aten = torch.ops.aten


def loose() -> Iterator[str]:
    """Functions of the folder that have the signature of a rewrite."""
    for module in pkgutil.iter_modules(rewrites.__path__):
        if module.name == "table":
            continue
        found = vars(importlib.import_module(f"{rewrites.__name__}.{module.name}"))
        for name, each in found.items():
            if inspect.isfunction(each) and each.__module__.endswith(module.name) and not name.startswith("_"):
                annotations = list(each.__annotations__.values())
                if annotations == ["fx.Graph", "Settings", "int"]:
                    yield name


def test_every_rewrite_is_in_the_table() -> None:
    names = [each.name for each in REWRITES]
    assert sorted(names) == sorted(set(loose())) and len(names) == len(set(names))
    assert all(each.when and each.purpose for each in REWRITES)


def test_the_order_of_each_place() -> None:
    order = {when: [each.name for each in REWRITES if when in each.when] for when in When}
    assert order == {
        When.SUMS: [
            *("take_rows", "keep_masked_edges", "open_bags", "open_segments", "open_jagged", "count_small_keys"),
            "sort_sums",
        ],
        When.JOINT: [
            *("take_rows", "keep_masked_edges", "split_joined", "multiply_late", "open_bags", "open_segments"),
            *("count_small_keys", "sort_sums", "multiply_patches", "save_derivatives", "join_wide_norms"),
            *("open_norms", "put_off_expands"),
        ],
        When.BACKWARD: ["narrow_products", "copy_sums_operands"],
        When.NORMAL_FORM: [
            *("remove_dead", "unlift_constants", "fold_batches", "join_biases", "join_gelus", "open_factors"),
            *("split_to_slices", "split_maxima", "squeeze_out_of_place", "copy_views"),
        ],
        When.CONVOLUTIONS: ["to_pixels"],
        When.ROWS: ["write_together", "align_rows"],
        When.PLACED: ["unalign_rows", "join_maxima", "from_pixels"],
        When.AROUND: ["join_norm_gradients", "fuse_activations"],
        When.AROUND_INFERENCE: ["pad_products", "multiply_reals", "share_keys"],
        When.CALLED: ["keep_lists"],
    }


def doubled(x: Tensor) -> Tensor:
    return x.relu() + 1


def test_a_wrong_value_is_found() -> None:
    """What tests put in the place of ``table.check`` computes new nodes anew."""

    def wrong(graph: fx.Graph, _: Settings) -> int:
        (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
        with graph.inserting_after(relu):
            made = call(relu, aten.neg.default, relu)
        made.meta["val"] = relu.meta["val"].new_empty(3)
        relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        return 1

    with pytest.raises(AssertionError, match="wrong: .*neg.* is"):
        rewrite(trace(doubled, (torch.randn(4, 5),)), wrong)


def test_what_is_no_graph_is_found() -> None:
    def wrong(graph: fx.Graph, _: Settings) -> int:
        (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
        relu.append(relu.all_input_nodes[0])  # behind what reads it
        return 1

    with pytest.raises(RuntimeError, match="before it has been defined"):
        rewrite(trace(doubled, (torch.randn(4, 5),)), wrong)


def test_a_rewrite_that_changes_nothing_leaves_the_graph() -> None:
    graph = trace(doubled, (torch.randn(4, 5),))
    before = str(graph.graph)
    assert rewrite(graph, When.JOINT) == rewrite(graph, When.AROUND_INFERENCE) == 0 and str(graph.graph) == before

"""What the benchmark of graph networks makes by itself: graphs, triplets, masks, experts. Without PyTorch Geometric."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.lib import gnn_models, masked_models
from benchmarks.run import gnn
from benchmarks.tables import gnn_tables


@pytest.mark.parametrize("kind", ["uniform", "power", "nearest"])
def test_graphs_have_the_edges_asked_for(kind: str):
    nodes, edges = 1000, 1000 * gnn_models.NEIGHBOURS
    made = gnn_models.graph(kind, nodes, edges)
    assert made.shape == (2, edges)
    assert made.min() >= 0
    assert made.max() < nodes
    degrees = torch.bincount(made[1], minlength=nodes)
    if kind == "nearest":
        assert degrees.eq(gnn_models.NEIGHBOURS).all()
    else:
        assert (degrees.max() > 20 * degrees.float().mean()) == (kind == "power")


def test_triplets_are_the_pairs_of_edges_that_meet():
    *_, edges = gnn_models.molecules(2, 3.0)
    i, j, k, kj, ji = gnn_models.triplets(edges, 2 * gnn_models.ATOMS)
    found = set(zip(kj.tolist(), ji.tolist(), strict=True))
    listed = edges.t().tolist()
    wanted = {(a, b) for a, (k_, j_) in enumerate(listed) for b, (j2, i_) in enumerate(listed) if j_ == j2 and k_ != i_}
    assert found == wanted
    assert torch.equal(edges[0][ji], j)
    assert torch.equal(edges[1][ji], i)
    assert torch.equal(edges[0][kj], k)


@pytest.mark.parametrize("name", masked_models.ATTENTION)
def test_block_masks_keep_the_pairs_of_the_dense_ones(name: str):
    module, _ = masked_models.ATTENTION[name].problem("cpu", tiny=True)
    tokens = module.dense.shape[0]
    blocks = module.mask.to_dense()[0, 0].bool()
    size = tokens // blocks.shape[0]
    assert torch.equal(blocks, F.max_pool2d(module.dense[None].float(), size)[0].bool())


def test_experts_are_those_of_the_loop():
    module, (x,) = masked_models.experts("cpu", tiny=True)
    chosen, _ = module.chosen(x)
    wide = copy.deepcopy(masked_models.Loop(module)).double()
    exact = wide(x.double(), chosen)
    assert (module(x).double() - exact).norm() < 0.02 * exact.norm()


def test_the_page_is_what_the_results_say():
    text = gnn_tables.PAGE.read_text(encoding="utf-8")
    assert gnn_tables.filled(text) == text, "run python -m benchmarks.tables.gnn_tables"


def test_rows_of_the_table():
    """Cases of one mode, with what failed left out, and the list that is kept beside inference."""
    times = {"eager": 30.0, "inductor": 20.0, "tilestream": 10.0}
    rows = [
        {"case": f"{name}{mode}", "us": us, "floor_us": 1.0, "speedup": 2.0}
        for name in ("gatv2/uniform", "experts")
        for mode, us in (("", times), ("/training", times), ("/kept", times))
    ]
    rows.append({"case": "gin/power", "us": {"eager": 3.0}, "floor_us": 1.0, "failed": {"tilestream": "why"}})
    found = gnn_tables.lines(rows, "").splitlines()
    assert [line.split("|")[1].strip() for line in found[2:6]] == [
        "GATv2, 3 layers, 4 heads of 32, kept aside",
        "GATv2, 3 layers, 4 heads of 32, kept aside, the list kept",
        gnn_tables.WHAT["experts"],
        f"{gnn_tables.WHAT['experts']}, the list kept",
    ]
    assert found[-3] == "Geometric mean of the gains: 2.00, of 2."
    assert found[-1] == f"Not captured as a CUDA graph in that run: {gnn_tables.WHAT['gin']} (power law)."
    alone = [{**rows[0], "us": {"eager": 3.0, "tilestream": 1.0}}]
    assert "| - | 1.0 | - |" in gnn_tables.lines(alone, "")  # no gain where Inductor compiled nothing
    assert gnn_tables.lines(rows, "training").count("\n| ") == 3
    assert set(gnn_tables.WHAT) == set(gnn.groups())


def test_the_fresh_models_come_first():
    fresh = [gnn_models.MODELS[g].fresh for g in gnn.groups() if g in gnn_models.MODELS]
    assert fresh == sorted(fresh, reverse=True)
    assert sum(m.fresh for m in gnn_models.MODELS.values()) >= 4


def test_rows_of_the_reference_machine_replace_no_measured_ones(tmp_path: Path) -> None:
    usual, parser = tmp_path / "gnn.json", gnn.asked(None)
    assert gnn.place(parser.parse_args([]), usual) == usual
    assert gnn.place(parser.parse_args(["--cpu"]), usual) is None
    assert gnn.place(parser.parse_args(["--cpu", "--out", "here.json"]), usual) == Path("here.json")

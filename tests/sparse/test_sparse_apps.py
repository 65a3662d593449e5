"""The sparse applications and their graphs: sizes, masks, counts, and errors for what is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.apps.sparse import GCN, GPT3, SAE, Attention, GraphSAGE, bigbird_mask
from tilestream.apps.sparse.gpt3 import bigbird_blocks
from tilestream.errors import SparseError
from tilestream.sparse import graphs


@pytest.mark.parametrize(("block", "kept", "of"), [(16, 549, 4096), (32, 268, 1024), (64, 118, 256)])
def test_bigbird_keeps_the_blocks_that_the_paper_counts(block: int, kept: int, of: int) -> None:
    blocks = bigbird_blocks(1024, block)
    assert (blocks.sum(), blocks.size) == (kept, of)


def test_bigbird_mask_is_made_of_whole_blocks() -> None:
    mask = bigbird_mask(64, 16)
    tiles = mask.reshape(4, 16, 4, 16).permute(0, 2, 1, 3).reshape(16, -1)
    assert bool(((tiles == 0).all(1) | (tiles == 1).all(1)).all())


def test_attention_is_torchs_over_what_the_mask_keeps() -> None:
    q, k, v = torch.randn(3, 2, 32, 8, dtype=torch.float64)
    mask = bigbird_mask(32, 8)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())
    torch.testing.assert_close(Attention()(q, k, v, mask), want)


def test_gcn_is_its_formula() -> None:
    graph = graphs.karate()
    model, x = GCN(5, 4, 3), torch.randn(34, 5, dtype=torch.float64)
    a = graph.torch().to_dense()
    hidden = (a @ x @ model.weight1 + model.bias1).clamp(min=0)
    want = (a @ hidden @ model.weight2 + model.bias2).softmax(-1)
    torch.testing.assert_close(model(graph.torch(), x), want)
    torch.testing.assert_close(model(a, x), want)


def test_graphsage_and_autoencoder_are_their_formulas() -> None:
    sage, a = GraphSAGE(5, 4, 3), graphs.karate().torch().to_dense()
    features = torch.randn(34, 5, dtype=torch.float64)
    p, x = dict(sage.named_parameters()), features
    for layer in (1, 2):
        own = x @ p[f"weight_self{layer}"] + p[f"bias_self{layer}"]
        x = (own + a @ x @ p[f"weight_near{layer}"] + p[f"bias_near{layer}"]).relu()
    torch.testing.assert_close(sage(a, features), x)
    sae, images = SAE(20, 6), torch.rand(3, 20, dtype=torch.float64)
    want = (images @ sae.encoder + sae.encoder_bias).relu() @ sae.decoder + sae.decoder_bias
    torch.testing.assert_close(sae(images), want)


def test_weights_are_as_full_as_asked() -> None:
    assert abs(float((SAE(400, 100, 0.5).encoder != 0).double().mean()) - 0.5) < 0.01
    assert abs(float((SAE(400, 100, 0.1).decoder != 0).double().mean()) - 0.1) < 0.01


def test_gpt3_has_the_published_size() -> None:
    with torch.device("meta"):
        decoder = GPT3(decoders=1)
    assert sum(p.numel() for p in decoder.decoders[0].parameters()) == 12 * 768**2 + 13 * 768
    small = GPT3(16, 2, 32, 2)
    assert small(torch.randn(32, 16, dtype=torch.float64), bigbird_mask(32, 8)).shape == (32, 16)


def test_karate_club() -> None:
    club = graphs.karate()
    assert (club.nodes, club.edges, club.two_paths) == (34, 156, 1212)
    assert (club.adjacency != club.adjacency.T).nnz == 0


@pytest.mark.parametrize("name", ["cora", "cora_ml", "dblp"])
def test_random_graphs_have_the_counts_of_their_set(name: str) -> None:
    graph, counts = graphs.like(name), graphs.COUNTS[name]
    assert (graph.nodes, graph.edges, graph.features) == (counts.nodes, counts.edges, counts.features)
    assert (graph.adjacency != graph.adjacency.T).nnz == 0 and graph.adjacency.diagonal().sum() == 0
    if counts.two_paths:
        assert abs(graph.two_paths / counts.two_paths - 1) < 0.15


@settings(max_examples=20, deadline=None)
@given(nodes=st.integers(2, 60), share=st.floats(0, 1), seed=st.integers(0, 5))
def test_random_graphs_are_simple_and_have_the_links_asked_for(nodes: int, share: float, seed: int) -> None:
    most = nodes * (nodes - 1) // 2
    links = round(most * share)
    made = graphs.power_law(nodes, links, seed=seed)
    assert made.nnz == 2 * links and made.diagonal().sum() == 0
    assert set(np.unique(made.data)) <= {1.0}


def test_blocks_hold_the_links_of_a_block_diagonal_graph() -> None:
    made = graphs.block_diagonal(100, 0.05, blocks=10).tocoo()
    assert np.all(made.row // 10 == made.col // 10)
    assert graphs.block_diagonal(100, 0.5).nnz == graphs.uniform(100, 0.5).nnz == 5000


def test_self_loops() -> None:
    looped = graphs.karate().with_self_loops()
    assert looped.edges == 156 + 34 and "self loops" in looped.note


def test_cora_is_read_as_an_undirected_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cora.cites").write_text("7\t5\n5\t7\n9\t7\n9\t9\n")
    graph = graphs.cora(tmp_path)
    assert (graph.nodes, graph.edges, graph.features, graph.classes) == (3, 4, 1433, 7)
    assert graph.adjacency.toarray().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    monkeypatch.setenv(graphs.CORA, str(tmp_path / "cora.cites"))
    assert graphs.load("cora").edges == 4
    monkeypatch.delenv(graphs.CORA)
    with pytest.raises(SparseError, match="TILESTREAM_CORA"):
        graphs.cora()
    with pytest.raises(SparseError, match="no file"):
        graphs.cora(tmp_path / "gone")
    (tmp_path / "cora.cites").write_text("a b\n")
    with pytest.raises(SparseError, match="paper ids"):
        graphs.cora(tmp_path)


@pytest.mark.parametrize("prefix", ["adj_", "adj_matrix."])
def test_cora_ml_is_read_as_it_was_published(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CSR matrix of citations, each once; links are made undirected, own citations go, labels stay shut."""
    nodes = graphs.COUNTS["cora_ml"].nodes
    indptr = np.minimum(np.arange(nodes + 1), 2) * 2  # two papers that cite two others each
    arrays = {
        f"{prefix}data": np.array([1.0, 1.0, 1.0, 0.0], dtype=np.float32),
        f"{prefix}indices": np.array([0, 1, 0, 5], dtype=np.int32),
        f"{prefix}indptr": indptr.astype(np.int32),
        f"{prefix}shape": np.array([nodes, nodes]),
        "labels": np.array([{"an": "object"}], dtype=object),
    }
    file = tmp_path / "cora_ml.npz"
    np.savez(file, **arrays)
    graph = graphs.npz("cora_ml", tmp_path)
    assert (graph.nodes, graph.edges, graph.features, graph.real) == (2995, 2, 2879, True)
    assert graph.adjacency[0, 1] == graph.adjacency[1, 0] == 1
    monkeypatch.setenv(graphs.FILES["cora_ml"], str(file))
    assert graphs.load("cora_ml").edges == 2 and not graphs.load("collab").real
    with pytest.raises(SparseError, match="dblp has 17716 nodes"):
        graphs.npz("dblp", file)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(graphs.FILES["dblp"], raising=False)
    with pytest.raises(SparseError, match="TILESTREAM_DBLP"):
        graphs.npz("dblp")
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "objects.npz", adj_indptr=np.array([{}], dtype=object))
    for name in ("gone.npz", "text.npz", "other.npz", "objects.npz"):
        with pytest.raises(SparseError, match="does not hold the links of dblp"):
            graphs.npz("dblp", tmp_path / name)


def test_a_random_graph_can_be_told_its_walks() -> None:
    few, many = (graphs.like("dblp", scale=0.1, two_paths=n).two_paths for n in (1_800_000, 3_000_000))
    assert few < 0.8 * many


def test_graphs_of_other_libraries() -> None:
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    data = SimpleNamespace(edge_index=torch.from_numpy(edges), x=torch.zeros(4, 6), num_nodes=4, y=torch.tensor([0, 2]))
    pyg = graphs.from_pyg(data)
    assert (pyg.nodes, pyg.edges, pyg.features, pyg.classes) == (4, 3, 6, 3)
    ogb = graphs.from_ogb({"edge_index": edges, "num_nodes": 5, "node_feat": np.zeros((5, 2))}, classes=4)
    assert (ogb.nodes, ogb.edges, ogb.features, ogb.classes) == (5, 3, 2, 4)
    with pytest.raises(SparseError, match="edge_index"):
        graphs.from_pyg(SimpleNamespace())
    with pytest.raises(SparseError, match="num_nodes"):
        graphs.from_ogb({"edge_index": edges})


def test_bad_graphs_are_refused() -> None:
    with pytest.raises(SparseError, match="one of"):
        graphs.like("citeseer")
    with pytest.raises(SparseError, match="scale"):
        graphs.like("cora", scale=2)
    with pytest.raises(SparseError, match="links"):
        graphs.power_law(3, 4)
    with pytest.raises(SparseError, match="density"):
        graphs.uniform(3, 2.0)

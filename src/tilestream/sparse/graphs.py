"""Graphs for the sparse applications: real ones, the karate club, and random ones with the counts of a real one.

A graph here is its adjacency matrix. The links of Cora, Cora_ML and DBLP are not part of this package: give their
files by an argument or by the environment variables ``TILESTREAM_CORA``, ``TILESTREAM_CORA_ML``, ``TILESTREAM_DBLP``.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

from tilestream.errors import SparseError

CORA = "TILESTREAM_CORA"
FILES = {"cora": CORA, "cora_ml": "TILESTREAM_CORA_ML", "dblp": "TILESTREAM_DBLP"}
"""The environment variable that says where the links of a set are."""
HAD = f"unpack cora.tgz of LINQS (linqs.org/datasets), and give the path of its cora.cites, or set {CORA} to it"


@dataclass(frozen=True)
class GraphSet:
    """A graph with the sizes of what its nodes carry.

    ``adjacency``: float64 CSR [nodes, nodes] of zeros and ones; a row holds the neighbours of its node.
    ``features`` and ``classes`` are widths: the values themselves do not change what is counted here.
    ``real``: the links are those of the data set; otherwise ``note`` says which of its counts they keep.
    """

    name: str
    adjacency: scipy.sparse.csr_matrix
    features: int
    classes: int
    real: bool
    note: str = ""

    @property
    def nodes(self) -> int:
        return len(self.adjacency.indptr) - 1

    @property
    def edges(self) -> int:
        """Directed edges: an undirected link counts twice."""
        return int(self.adjacency.nnz)

    @property
    def two_paths(self) -> int:
        """Walks of two edges: how often full fusion of two layers visits a neighbour's neighbour."""
        out = np.diff(self.adjacency.indptr)
        return int(out[self.adjacency.indices].sum())

    def torch(self) -> torch.Tensor:
        """The adjacency matrix as a float64 torch CSR tensor."""
        a = self.adjacency
        indptr, indices = torch.as_tensor(a.indptr.astype(np.int64)), torch.as_tensor(a.indices.astype(np.int64))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR")  # that the layout is in beta
            return torch.sparse_csr_tensor(indptr, indices, torch.as_tensor(a.data), a.shape, check_invariants=True)

    def with_self_loops(self) -> GraphSet:
        """The same graph where every node is also its own neighbour."""
        looped = scipy.sparse.csr_matrix(self.adjacency + scipy.sparse.identity(self.nodes, format="csr"))
        looped.data[:] = 1.0
        return replace(self, adjacency=looped, note=f"{self.note} self loops added".strip())


@dataclass(frozen=True)
class Counts:
    """What Table 2 and the data sets' own pages say of a graph. ``two_paths``: sum over its nodes of degree squared,
    counted on the public set; 0 where nobody has."""

    nodes: int
    edges: int
    features: int
    classes: int
    two_paths: int = 0


COUNTS = {
    "cora": Counts(2708, 10556, 1433, 7),
    "cora_ml": Counts(2995, 16316, 2879, 7, 292_482),
    "dblp": Counts(17716, 105734, 1639, 4),
    "collab": Counts(235868, 2358104, 128, 2),
    "mag": Counts(1939743, 10832542, 128, 349),
    "karate": Counts(34, 156, 34, 2),
}
"""Nodes and features are Table 2's; edges and classes are those of the public sets of these names."""


def cora(path: str | Path | None = None) -> GraphSet:
    """The citation links of Cora, undirected, without duplicates and self citations: 2,708 nodes, 10,556 edges.

    Nodes are numbered in the order of their paper ids. ``path``: ``cora.cites`` or its folder; by default what
    ``TILESTREAM_CORA`` says.

    Raises:
        SparseError: no path, no file, or lines that are not pairs of ids.
    """
    given = path or os.environ.get(CORA)
    if not given:
        raise SparseError("Cora's links are not part of this package", HAD)
    file = Path(given)
    file = file / "cora.cites" if file.is_dir() else file
    if not file.is_file():
        raise SparseError(f"there is no file {str(file)!r}", HAD)
    try:
        pairs = np.loadtxt(file, dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise SparseError(f"{file.name} does not hold pairs of paper ids: {error}", "use LINQS's cora.cites") from None
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise SparseError(f"{file.name} does not hold pairs of paper ids", "use LINQS's cora.cites")
    ids, index = np.unique(pairs, return_inverse=True)
    made = _undirected(index.reshape(pairs.shape), len(ids))
    return GraphSet("cora", made, COUNTS["cora"].features, COUNTS["cora"].classes, real=True)


def npz(name: str, path: str | Path | None = None) -> GraphSet:
    """Cora_ML or DBLP as Bojchevski and Guennemann published them (2018, "Deep Gaussian Embedding of Graphs"):
    undirected, without self citations.

    ``path``: the ``.npz`` file, or its folder; by default what ``FILES[name]`` says. Of the file only the adjacency
    matrix is read: ``adj_data``, ``adj_indices``, ``adj_indptr`` and ``adj_shape`` of a CSR matrix, or the same behind
    ``adj_matrix.``.

    Raises:
        SparseError: no path, no file, no such arrays, or a matrix with another number of nodes than the set.
    """
    given = path or os.environ.get(FILES[name])
    remedy = f"give the path of {name}.npz, or set {FILES[name]}"
    if not given:
        raise SparseError(f"the links of {name} are not part of this package", remedy)
    file = Path(given)
    file = file / f"{name}.npz" if file.is_dir() else file
    try:
        with np.load(file, allow_pickle=False) as arrays:
            prefix = "adj_" if "adj_indptr" in arrays else "adj_matrix."
            parts = [arrays[prefix + part] for part in ("data", "indices", "indptr")]
            links = scipy.sparse.csr_matrix(tuple(parts), shape=tuple(arrays[f"{prefix}shape"])).tocoo()
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise SparseError(f"{str(file)!r} does not hold the links of {name}: {error}", remedy) from None
    counts = COUNTS[name]
    if links.shape != (counts.nodes, counts.nodes):
        raise SparseError(f"{file.name} has a matrix of {links.shape}, {name} has {counts.nodes} nodes", remedy)
    kept = links.data != 0
    made = _undirected(np.stack([links.row[kept], links.col[kept]], axis=1).astype(np.int64), counts.nodes)
    return GraphSet(name, made, counts.features, counts.classes, real=True)


def karate() -> GraphSet:
    """Zachary's karate club: 34 members, 78 friendships (156 directed edges), one-hot features."""
    import networkx

    club = networkx.karate_club_graph()
    made = _undirected(np.array(club.edges(), dtype=np.int64), club.number_of_nodes())
    counts = COUNTS["karate"]
    return GraphSet("karate", made, counts.features, counts.classes, real=True)


def like(name: str, seed: int = 0, scale: float = 1.0, two_paths: float = 0.0) -> GraphSet:
    """A random graph with the nodes, edges, features and classes of the set ``name``.

    Degrees follow a power law whose exponent makes the walks of two edges as many as the set's, where that is known:
    they decide what full fusion costs. ``scale`` < 1 keeps that share of the nodes and the mean degree. ``two_paths``:
    the walks that it shall have, where the set's are not known.

    Raises:
        SparseError: no such set, or a scale outside (0, 1].
    """
    if name not in COUNTS:
        raise SparseError(f"no counts of a graph called {name!r}", f"use one of {', '.join(COUNTS)}")
    if not 0 < scale <= 1:
        raise SparseError(f"scale {scale}", "use a share in (0, 1]")
    counts = COUNTS[name]
    nodes, links = max(2, round(counts.nodes * scale)), max(1, round(counts.edges * scale / 2))
    per_node = (two_paths or counts.two_paths) / counts.nodes
    made = power_law(nodes, links, per_node, seed)
    note = f"random, with {name}'s counts" + (f" at scale {scale:g}" if scale != 1 else "")
    return GraphSet(f"{name}-like", made, counts.features, counts.classes, real=False, note=note)


def power_law(nodes: int, links: int, two_paths_per_node: float = 0.0, seed: int = 0) -> scipy.sparse.csr_matrix:
    """An undirected simple graph of exactly ``links`` links, whose expected degrees are ``rank ** -a``.

    ``a`` is the exponent that gives ``two_paths_per_node``; 0.5 where that is 0. Chung-Lu: both ends of a link are
    drawn by weight, duplicates are drawn again.

    Raises:
        SparseError: more links than pairs of nodes.
    """
    if links > nodes * (nodes - 1) // 2:
        raise SparseError(f"{links} links among {nodes} nodes", "ask for fewer links than pairs of nodes")
    mean = 2 * links / nodes
    exponent = 0.5
    if two_paths_per_node:
        low, high = 0.0, 1.5
        for _ in range(50):
            exponent = (low + high) / 2
            weight = np.arange(1, nodes + 1, dtype=np.float64) ** -exponent
            degree = weight / weight.mean() * mean
            expected = (degree**2).mean() + mean  # of Poisson degrees around these means
            low, high = (exponent, high) if expected < two_paths_per_node else (low, exponent)
    random = np.random.default_rng(seed)
    weight = random.permutation(np.arange(1, nodes + 1, dtype=np.float64)) ** -exponent  # hubs stand anywhere
    return _sample(nodes, links, lambda n: random.choice(nodes, (n, 2), p=weight / weight.sum()), random)


def uniform(nodes: int, density: float, seed: int = 0) -> scipy.sparse.csr_matrix:
    """Every pair of nodes is linked with the same probability; exactly the nearest number of links to ``density``."""
    random = np.random.default_rng(seed)
    return _sample(nodes, _links(nodes, density), lambda n: random.integers(0, nodes, (n, 2)), random)


def block_diagonal(nodes: int, density: float, blocks: int = 10, seed: int = 0) -> scipy.sparse.csr_matrix:
    """Links within ``blocks`` groups of neighbours only, as far as they hold ``density``; then larger groups."""
    random = np.random.default_rng(seed)
    links = _links(nodes, density)
    groups = max(1, blocks)
    while groups > 1 and groups * (nodes // groups) * (nodes // groups - 1) // 2 < links:
        groups -= 1
    size = nodes // groups

    def pairs(n: int) -> np.ndarray:
        group = random.integers(0, groups, n)
        within = random.integers(0, size, (n, 2))
        return group[:, None] * size + within

    return _sample(nodes, min(links, groups * size * (size - 1) // 2), pairs, random)


def from_pyg(data: object, name: str = "pyg", classes: int = 0) -> GraphSet:
    """A graph from a ``torch_geometric.data.Data`` (or anything with ``edge_index``, ``x`` or ``num_nodes``).

    Raises:
        SparseError: no ``edge_index`` of shape [2, edges], a node that is not there, or no number of nodes.
    """
    edges = getattr(data, "edge_index", None)
    edges = None if edges is None else np.asarray(edges)
    if edges is None or edges.ndim != 2 or edges.shape[0] != 2:
        raise SparseError(f"{type(data).__name__} has no edge_index of [2, edges]", "give a torch_geometric Data")
    features = getattr(data, "x", None)
    nodes = getattr(data, "num_nodes", None)
    if nodes is None:
        nodes = len(features) if features is not None else int(edges.max(initial=-1)) + 1
    labels = getattr(data, "y", None)
    count = classes or (int(labels.max()) + 1 if labels is not None and labels.numel() else 0)
    width = int(features.shape[1]) if features is not None else 0
    return GraphSet(name, _directed(edges, int(nodes)), width, count, real=True)


def from_ogb(graph: dict, name: str = "ogb", classes: int = 0) -> GraphSet:
    """A graph from the dictionary that OGB's library-agnostic loaders give (``edge_index``, ``num_nodes``, ...).

    Raises:
        SparseError: keys that are missing, or a node that is not there.
    """
    if missing := [key for key in ("edge_index", "num_nodes") if graph.get(key) is None]:
        raise SparseError(f"the graph has no {missing[0]}", "give the dictionary of ogb's NodePropPredDataset[0][0]")
    features = graph.get("node_feat")
    width = int(features.shape[1]) if features is not None else 0
    made = _directed(np.asarray(graph["edge_index"]), int(graph["num_nodes"]))
    return GraphSet(name, made, width, classes, real=True)


def load(name: str, path: str | None = None, seed: int = 0) -> GraphSet:
    """The graph called ``name``: karate, a set whose file is known (``FILES``), or one with the counts of a set."""
    if name == "karate":
        return karate()
    if name in FILES and (path or os.environ.get(FILES[name])):
        return cora(path) if name == "cora" else npz(name, path)
    return like(name, seed)


def _links(nodes: int, density: float) -> int:
    if not 0 <= density <= 1:
        raise SparseError(f"density {density}", "use a share from 0 to 1")
    return min(round(nodes * nodes * density / 2), nodes * (nodes - 1) // 2)


def _sample(
    nodes: int, links: int, draw: Callable[[int], np.ndarray], random: np.random.Generator
) -> scipy.sparse.csr_matrix:
    """Exactly ``links`` different pairs: from what ``draw`` gives and, where that repeats itself too often, any."""
    codes = np.zeros(0, dtype=np.int64)
    for _ in range(60):
        want = links - len(codes)
        if want <= 0:
            break
        pairs = draw(2 * want + 16)
        low, high = pairs.min(axis=1), pairs.max(axis=1)
        fresh = (low * nodes + high)[low != high]
        seen, first = np.unique(np.concatenate([codes, fresh]), return_index=True)
        codes = seen[np.argsort(first)][:links]  # in the order drawn, so that none is favoured
    if len(codes) < links:  # nearly complete: the rest is chosen among the pairs that are left
        low, high = np.triu_indices(nodes, 1)
        left = np.setdiff1d(low * nodes + high, codes)
        codes = np.concatenate([codes, random.choice(left, links - len(codes), replace=False)])
    return _undirected(np.stack([codes // nodes, codes % nodes], axis=1), nodes)


def _undirected(pairs: np.ndarray, nodes: int) -> scipy.sparse.csr_matrix:
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return _directed(np.concatenate([pairs, pairs[:, ::-1]]).T, nodes)


def _directed(edges: np.ndarray, nodes: int) -> scipy.sparse.csr_matrix:
    if edges.size and not 0 <= edges.min() <= edges.max() < nodes:
        wrong = edges.max() if edges.min() >= 0 else edges.min()
        raise SparseError(f"an edge of node {wrong}, of {nodes}", f"number nodes from 0 to {nodes - 1}")
    made = scipy.sparse.csr_matrix((np.ones(edges.shape[1]), (edges[0], edges[1])), shape=(nodes, nodes))
    made.sum_duplicates()
    made.data[:] = 1.0
    made.sort_indices()
    return made

"""What SAM's compiler and its hand-made graphs leave to the reader: drops of values, and of coordinates alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from sam_expressions import expression
from sam_graphs import run_dot, sam

from tilestream.errors import SparseError
from tilestream.sparse import engine, run_spec
from tilestream.sparse.dot import from_dot, to_dot
from tilestream.sparse.storage import pack

INNER_NODES = """
    1 fiberlookup index=i tensor=B mode=0 format=compressed root=true
    2 repsiggen index=i
    3 repeat index=i tensor=C root=true
    4 fiberlookup index=j tensor=C mode=1 format=compressed root=false
    5 repsiggen index=j
    6 repeat index=j tensor=B root=false
    7 fiberlookup index=k tensor=B mode=1 format=compressed root=false
    8 fiberlookup index=k tensor=C mode=0 format=compressed root=false
    9 intersect index=k
    10 arrayvals tensor=B
    11 arrayvals tensor=C
    12 mul
    13 reduce
    14 fiberwrite mode=vals tensor=X
    15 fiberwrite index=i tensor=X mode=0 format=compressed
    16 fiberwrite index=j tensor=X mode=1 format=compressed
    """
INNER_EDGES = """
    1 2 crd
    2 3 repsig
    3 4 ref
    4 5 crd
    5 6 repsig
    1 6 ref
    6 7 ref
    4 8 ref
    7 9 crd_in-B
    7 9 ref_in-B
    8 9 crd_in-C
    8 9 ref_in-C
    9 10 ref_out-B
    9 11 ref_out-C
    10 12 val
    11 12 val
    """
"""X = B C by inner products, up to the products; what becomes of them is said in each test."""


def inner(nodes: str, edges: str) -> str:
    return sam(INNER_NODES + nodes, INNER_EDGES + edges, "X=ss01,B=ss01,C=ss10")


def same_on_random_matrices(text: str, expected, names: str = "BC") -> None:
    """The graph's values are ``expected``'s, on the specification and on the engine, empty rows and all."""
    got = from_dot(text)
    for seed, density in enumerate((0.0, 0.1, 0.3, 0.3, 0.6, 1.0)):
        rng = np.random.default_rng(seed)
        arrays = {}
        for name in names:
            shape = (5,) * len(got.formats[name].levels)
            arrays[name] = np.where(rng.random(shape) < density, rng.integers(-4, 5, shape), 0).astype(np.float64)
        want = expected(**arrays)
        slow = run_dot(got, arrays, want.shape)
        np.testing.assert_allclose(slow.outputs[got.graph.results()[0]].to_dense(), want, atol=1e-12)
        tensors = {name: pack(name, arrays[name], got.formats[name]) for name in got.graph.tensors()}
        shapes = {name: (want.shape, got.formats[name]) for name in got.graph.results()}
        assert engine.run(got.graph, tensors, shapes=shapes).nodes == slow.nodes


def relu_of_product(B, C):
    return np.maximum(B @ C, 0)


@pytest.mark.parametrize(
    "drop", ["crddrop outer=j inner=val mode=0", "crddrop outer=j inner=vals vals=true", "valdrop"]
)
def test_what_is_zero_is_dropped_in_three_ways_to_write_it(drop):
    nodes = f"20 smax const0=0\n21 {drop}\n22 crddrop outer=i inner=j"
    edges = """
        12 13 val
        13 20 val
        20 21 val_inner-val
        4 21 crd_outer-j
        21 22 crd_outer-j
        1 22 crd_outer-i
        21 14 val_inner-val
        22 15 crd_outer-i
        22 16 crd_inner-j
        """
    if drop == "valdrop":
        edges = edges.replace("21 22 crd_outer-j", "21 22 crd_inner-j")
    same_on_random_matrices(inner(nodes, edges), relu_of_product)


def test_values_beside_a_drop_of_their_coordinates():
    """The coordinates lose empty fibers before the values come to them: the values lose the same ones."""
    nodes = "18 crddrop outer=i inner=j\n19 crddrop outer=j inner=k\n20 max\n21 valdrop\n22 crddrop outer=i inner=j"
    edges = """
        12 19 val_inner-k
        4 19 crd_outer-j
        19 13 val_inner-k
        13 20 val
        20 21 val_relu-val
        19 18 crd_inner-j
        1 18 crd_outer-i
        18 21 crd_inner-j
        18 22 crd_outer-i
        21 22 crd_inner-j
        21 14 val
        22 15 crd_outer-i
        22 16 crd_inner-j
        """
    same_on_random_matrices(inner(nodes, edges), relu_of_product)


def test_values_that_nobody_dropped_with_their_coordinates():
    """As SAM's compiler wires it: coordinates go where a fiber is empty, and the sum over it, a 0, stays."""
    nodes = "18 crddrop outer=i inner=j\n19 crddrop outer=j inner=k"
    edges = """
        12 13 val
        13 14 val
        4 19 crd_j
        9 19 crd_in-k
        1 18 crd_i
        19 18 crd_outer-j
        18 15 crd_outer-i
        18 16 crd_inner-j
        """
    same_on_random_matrices(inner(nodes, edges), lambda B, C: B @ C)


def test_a_vector_reducer():
    """Rows times a sparse matrix: fibers summed by j, the row's k being what comes above j."""
    nodes = """
        1 fiberlookup index=i tensor=B mode=0 format=compressed root=true
        2 repsiggen index=i
        3 repeat index=i tensor=C root=true
        4 fiberlookup index=k tensor=C mode=0 format=compressed root=false
        5 fiberlookup index=k tensor=B mode=1 format=compressed root=false
        6 intersect index=k
        7 fiberlookup index=j tensor=C mode=1 format=compressed root=false
        8 repsiggen index=j
        9 repeat index=j tensor=B root=false
        10 arrayvals tensor=B
        11 arrayvals tensor=C
        12 fp_mul
        20 vectorreducer accum_index=j fp=true
        21 crddrop outer=k inner=j
        22 crddrop outer=i inner=k
        14 fiberwrite mode=vals tensor=X
        15 fiberwrite index=i tensor=X mode=0 format=compressed
        16 fiberwrite index=j tensor=X mode=1 format=compressed
        """
    edges = """
        1 2 ref
        2 3 repsig
        3 4 ref
        1 5 ref
        4 6 crd_in-C
        4 6 ref_in-C
        5 6 crd_in-B
        5 6 ref_in-B
        6 7 ref_out-C
        7 8 crd
        8 9 repsig
        6 9 ref_out-B
        9 10 ref
        7 11 ref
        10 12 val
        11 12 val
        12 20 mul_val_out
        6 21 crd_outer-k
        7 21 crd_inner-j
        7 20 crd_j
        21 22 crd_inner-k
        1 22 crd_outer-i
        22 15 crd_outer-i
        20 16 crd_out-j
        20 14 final_vals
        """
    text = sam(nodes, edges, "X=ss01,B=ss01,C=ss01")
    text = text.replace('label="mul_val_out" type="mul"', 'label="mul_val_out" type="val"')
    text = text.replace('label="final_vals" type="final"', 'label="final_vals" type="val"')
    same_on_random_matrices(text, lambda B, C: B @ C)


VECTOR = """
    1 fiberlookup index=i tensor=b mode=0 format={0} root=true
    2 arrayvals tensor=b
    3 {2} outer=i inner=vals vals=true
    4 fiberwrite mode=vals tensor=x
    5 fiberwrite index=i tensor=x mode=0 format={1}
    """
VECTOR_EDGES = """
    1 3 crd_in-i
    1 2 ref
    2 3 val_in-vals
    3 5 crd_outer-i
    3 4 val_inner-vals
    """


def test_a_comment_that_names_other_tensors_leaves_formats_to_the_nodes():
    """As in SAM's ``masked_broadcast``, whose comment is a product's."""
    text = sam(VECTOR.format("dense", "compressed", "crddrop"), VECTOR_EDGES, "X=ss01,B=ss01")
    got = from_dot(text)
    assert (got.formats["b"].levels, got.formats["x"].levels) == (("dense",), ("compressed",))
    same_on_random_matrices(text, lambda b: b, "b")


def test_dense_to_compressed_and_back():
    dense = sam(VECTOR.format("dense", "compressed", "crddrop"), VECTOR_EDGES, "x=s0,b=d0")
    same_on_random_matrices(dense, lambda b: b, "b")
    stored = run_dot(from_dot(dense), {"b": np.array([0.0, 2.0, 0.0])}, (3,)).outputs["x"]
    assert stored.nnz == 1
    back = sam(VECTOR.format("compressed", "dense", "crdhold"), VECTOR_EDGES, "x=d0,b=s0")
    same_on_random_matrices(back, lambda b: b, "b")


def test_what_an_edge_carries_is_read_from_its_label_where_its_type_says_nothing():
    text = inner("", "12 13 val\n13 14 val\n1 15 crd\n4 16 crd")
    slip = text.replace('10 -> 12 [label="val" type="val"', '10 -> 12 [label="val" type="va"')
    assert slip != text
    assert from_dot(slip).graph == from_dot(text).graph


def test_a_drop_over_two_levels_is_refused():
    edges = "9 18 crd_k\n1 18 crd_i\n12 13 val\n13 14 val\n18 15 crd_outer-i\n4 16 crd"
    with pytest.raises(SparseError, match="2 levels below"):
        from_dot(inner("18 crddrop outer=i inner=k", edges))


def test_a_node_that_nothing_feeds_is_named():
    with pytest.raises(SparseError, match="nothing feeds DOT node '16'"):
        from_dot(inner("", "1 15 crd\n12 13 val\n13 14 val"))


def test_a_graph_that_drops_values_is_written_and_read_back():
    nodes = "21 valdrop"
    edges = "12 13 val\n13 21 val\n4 21 crd_j\n21 14 val\n1 15 crd\n21 16 crd_j"
    got = from_dot(inner(nodes, edges))
    again = from_dot(to_dot(got.graph, got.formats))
    assert set(again.graph.nodes) == set(got.graph.nodes)
    assert any(node.kind == "val_drop" for node in again.graph.nodes)


def test_times_without_values_are_refused_where_values_decide():
    got = from_dot(sam(VECTOR.format("dense", "compressed", "crddrop"), VECTOR_EDGES, "x=s0,b=d0"))
    tensors = {"b": pack("b", np.ones(3), got.formats["b"])}
    with pytest.raises(SparseError, match="keeps what is not 0"):
        engine.run(got.graph, tensors, shapes={"x": ((3,), got.formats["x"])}, values=False)


GRAPHS = os.environ.get("TILESTREAM_SAM_GRAPHS", "")


@pytest.mark.skipif(not GRAPHS, reason="TILESTREAM_SAM_GRAPHS does not say where SAM's own graphs are")
@pytest.mark.parametrize("path", sorted(Path(GRAPHS).rglob("*.gv")) if GRAPHS else [], ids=lambda p: p.stem)
def test_sams_own_graphs_give_right_values_or_are_refused(path: Path):
    """On matrices from empty to full; the specification and the engine agree. Refused is skipped, with the reason."""
    try:
        got = from_dot(path.read_text(), path.stem)
    except SparseError as error:
        pytest.skip(f"refused: {error}")
    result, operands = got.graph.results()[0], [name for name in got.formats if name in got.graph.tensors()]
    for seed, density in enumerate((0.0, 0.15, 0.15, 0.4, 0.4, 0.8, 0.8, 1.0)):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(2, 7))
        arrays = {}
        for name in operands:
            shape = (size,) * len(got.formats[name].levels)
            holds = rng.random(shape) < density if shape else True
            arrays[name] = np.where(holds, rng.integers(-5, 6, shape), 0).astype(np.float64)
        want = expression(path.stem)(*arrays.values())
        tensors = {name: pack(name, array, got.formats[name]) for name, array in arrays.items()}
        shapes = {result: (want.shape, got.formats[result])}
        fast = engine.run(got.graph, tensors, shapes=shapes)
        assert run_spec.run(got.graph, tensors, shapes=shapes).nodes == fast.nodes
        np.testing.assert_allclose(fast.outputs[result].to_dense(), want, atol=1e-12)

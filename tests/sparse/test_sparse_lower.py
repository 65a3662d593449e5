"""Lowering: the reference cycle counts of hand-built graphs, and joins, completion and location node by node."""

import numpy as np
import pytest

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Statement
from tilestream.sparse.program import Program, compile_einsum, declare
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format, compressed, dense, from_coo, from_scipy, from_torch, pack, repack, to_coo

DCSR, DCSC = compressed(2), Format(("compressed",) * 2, (1, 0))


def hashed(n, d, seed):
    """The matrices of the reference counts: about one element in ``d`` of [n, n] is 1..9."""
    i, j = np.meshgrid(np.arange(n, dtype=np.uint64), np.arange(n, dtype=np.uint64), indexing="ij")
    mask, u = np.uint64(0xFFFFFFFF), np.uint64
    x = (i * u(2654435761) + j * u(40503) + u(seed * 97)) & mask
    x = ((x ^ (x >> u(15))) * u(2246822519)) & mask
    x = ((x ^ (x >> u(13))) * u(3266489917)) & mask
    x ^= x >> u(16)
    return np.where(x % u(d) == 0, 1 + ((x >> u(8)) % u(9)), 0).astype(float)


def close(cycles, reference):
    assert abs(cycles - reference) <= 0.005 * reference, f"{cycles} against {reference}"


@pytest.mark.parametrize(("d", "order", "reference"), [(20, "ikj", 2145), (20, "ijk", 12731), (4, "ikj", 7969)])
def test_matmul(d, order, reference):
    b, c = hashed(50, d, 1), hashed(50, d, 2)
    formats = DCSC if order == "ijk" else DCSR
    program = compile_einsum("ik,kj->ij", [pack("B", b, DCSR), pack("C", c, formats)], Schedule(order=tuple(order)))
    result = program.run(engine="fast")
    close(result.cycles, reference)
    np.testing.assert_array_equal(result.output, b @ c)


@pytest.mark.parametrize(("d", "reference", "total"), [(20, 2238, 85641), (4, 33874, 12375037)])
def test_fused_chain(d, reference, total):
    arrays = [hashed(50, d, s) for s in (1, 2, 3)]
    operands = [pack(n, a, DCSR) for n, a in zip("BCD", arrays, strict=True)]
    result = compile_einsum("ik,kj,jl->il", operands, Schedule(fuse="all", order=tuple("ikjl"))).run(engine="fast")
    close(result.cycles, reference)
    assert result.output.sum() == total


@pytest.mark.parametrize(("d", "reference", "total"), [(20, 2062, 25766), (4, 9903, 140205)])
def test_dense_operand_is_located(d, reference, total):
    k, j = np.indices((50, 16))
    operands = [pack("B", hashed(50, d, 1), DCSR), pack("C", (7 * k + 3 * j) % 5 + 1.0, dense(2))]
    result = compile_einsum("ik,kj->ij", operands, Schedule(order=tuple("ikj"))).run(engine="fast")
    close(result.cycles, reference)
    assert result.output.sum() == total
    walked = compile_einsum("ik,kj->ij", operands, Schedule(order=tuple("ikj"), locate=False))
    kinds = [node.kind for node in walked.regions[0].graph.nodes]
    assert "intersect" in kinds and "locate" not in kinds


def statement_program(statements, arrays, formats, outputs):
    inputs = {n: pack(n, a, formats[n]) for n, a in arrays.items()}
    shapes, sizes = {n: a.shape for n, a in arrays.items()}, {}
    for s in statements:
        for access in s.operands:
            sizes |= dict(zip(access.indices, shapes[access.tensor], strict=True))
        shapes[s.name] = tuple(sizes[i] for i in s.indices)
    einsums = EinsumProgram({n: declare(t) for n, t in inputs.items()}, tuple(statements), outputs, shapes)
    return Program(einsums, Schedule(fuse="all"), list(inputs), {}, list(inputs.values()))


def test_elementwise_reference():
    b, c = hashed(50, 4, 1), hashed(50, 4, 2)
    for op, value, reference in (("mul", b * c, 1120), ("add", b + c, 1120)):
        ij = ("i", "j")
        statements = [Statement("T", ij, op, (Access("B", ij), Access("C", ij)))]
        program = statement_program(statements, {"B": b, "C": c}, {"B": DCSR, "C": DCSR}, ("T",))
        result = program.run(engine="fast")
        close(result.cycles, reference)
        np.testing.assert_array_equal(result.output, value)


def test_rows_in_one_operand_only_of_nested_unions():
    a, b, c = np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((4, 4))
    a[0, 1], b[2, 3], c[2, 0], c[3, 3] = 1, 2, 3, 4
    ij = ("i", "j")
    statements = [
        Statement("S", ij, "add", (Access("A", ij), Access("B", ij))),
        Statement("T", ij, "sub", (Access("S", ij), Access("C", ij))),
    ]
    program = statement_program(statements, {"A": a, "B": b, "C": c}, dict.fromkeys("ABC", DCSR), ("T",))
    np.testing.assert_array_equal(program.run(engine="spec").output, a + b - c)


def test_largest_of_negative_values_and_of_what_is_not_stored():
    full, partly = -np.ones((2, 3)), np.array([[-1.0, 0, -2], [-3, -4, -5]])
    statement = Statement("T", ("i",), "copy", (Access("A", ("i", "j")),), ("j",), "max")
    for array in (full, partly, np.zeros((2, 3))):
        program = statement_program([statement], {"A": array}, {"A": DCSR}, ("T",))
        np.testing.assert_array_equal(program.run(engine="spec").output, array.max(axis=1))


def test_bias_fills_rows_that_a_sparse_tensor_lacks():
    a, bias = np.zeros((3, 2)), np.array([1.0, 2.0])
    a[1, 0] = 5
    statements = [Statement("T", ("i", "j"), "add", (Access("A", ("i", "j")), Access("b", ("j",))))]
    program = statement_program(statements, {"A": a, "b": bias}, {"A": DCSR, "b": dense(1)}, ("T",))
    np.testing.assert_array_equal(program.run(engine="spec").output, a + bias)
    assert program.regions[0].outputs["T"][1].levels == ("dense", "dense")


def test_masked_softmax_stores_only_what_the_mask_has():
    rng = np.random.default_rng(0)
    scores, mask = rng.standard_normal((4, 4)), np.eye(4) + np.eye(4, k=1)
    ij, i = ("i", "j"), ("i",)
    statements = [
        Statement("M", ij, "mask", (Access("S", ij), Access("m", ij)), fill=-np.inf),
        Statement("x", i, "copy", (Access("M", ij),), ("j",), "max"),
        Statement("d", ij, "sub", (Access("M", ij), Access("x", i))),
        Statement("e", ij, "exp", (Access("d", ij),)),
        Statement("s", i, "copy", (Access("e", ij),), ("j",)),
        Statement("P", ij, "share", (Access("e", ij), Access("s", i))),
    ]
    program = statement_program(statements, {"S": scores, "m": mask}, {"S": dense(2), "m": DCSR}, ("P", "M"))
    result = program.run(engine="spec")
    powers = np.where(mask != 0, np.exp(scores), 0)
    np.testing.assert_allclose(result.outputs[0], powers / powers.sum(1, keepdims=True))
    np.testing.assert_array_equal(result.outputs[1], np.where(mask != 0, scores, -np.inf))
    assert result.tensors["P"].nnz == int(mask.sum())


def test_storage_round_trips_without_density():
    torch = pytest.importorskip("torch")
    sparse = pytest.importorskip("scipy.sparse")
    at = np.array([[999_999, 3], [5, 1_999_999], [5, 7]])
    tensor = from_coo("A", at, np.array([1.0, 2.0, 3.0]), (1_000_000, 2_000_000), DCSR)
    assert tensor.nnz == 3 and len(tensor.levels[0].crd) == 2
    where, values = to_coo(repack(tensor, DCSC))
    assert sorted(map(tuple, where)) == sorted(map(tuple, at)) and set(values) == {1, 2, 3}
    matrix = hashed(20, 4, 1)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        given = torch.from_numpy(matrix).to_sparse(layout=layout)
        np.testing.assert_array_equal(from_torch("B", given).to_dense(), matrix)
    np.testing.assert_array_equal(from_torch("B", torch.from_numpy(matrix).to_sparse_bsr((4, 4))).to_dense(), matrix)
    np.testing.assert_array_equal(from_scipy("B", sparse.csr_matrix(matrix)).to_dense(), matrix)


def test_free_order_and_reuse_of_constants():
    declared = {"A": Declared((3, 4))}
    statement = Statement("T", ("j", "i"), "copy", (Access("A", ("i", "j")),))
    einsums = EinsumProgram(declared, (statement,), ("T",), {"A": (3, 4), "T": (4, 3)})
    array = np.arange(12.0).reshape(3, 4)
    program = Program(einsums, Schedule(order=("j", "i")), [], {"A": pack("A", array, dense(2))})
    np.testing.assert_array_equal(program.run(engine="spec").output, array.T)
    assert not program.regions[0].notes


def test_blocks_multiply_tiles():
    """A blocked matmul is the scalar one on blocks: as many steps as the block pattern has, products as in PyTorch."""
    rng = np.random.default_rng(0)
    pattern = np.kron(rng.random((6, 6)) < 0.4, np.ones((4, 4)))
    b, c = pattern * rng.standard_normal((24, 24)), rng.standard_normal((24, 8))
    operands = [pack("B", b, DCSR), pack("C", c, dense(2))]
    program = compile_einsum("ik,kj->ij", operands, Schedule(block=4, order=tuple("ikj")))
    graph = program.regions[0].graph
    assert graph.block == 4 and [n.attr("op") for n in graph.nodes if n.kind == "alu"] == ["matmul"]
    result = program.run(engine="spec")
    np.testing.assert_allclose(result.output, b @ c)
    products = int(pattern[::4, ::4].sum()) * 2
    assert result.regions["T"].node("matmul_T").flops == products * 2 * 4**3
    for engine in ("fast", "spec"):
        assert program.run(engine=engine).cycles == result.cycles
    transposed = compile_einsum("ik,jk->ij", [operands[0], pack("C", c.T, dense(2))], Schedule(block=4))
    np.testing.assert_allclose(transposed.run(engine="spec").output, b @ c)


def test_a_result_in_blocks_beyond_its_edge():
    """Six rows in blocks of four: two blocks, whose padding is in no sum and in no result."""
    rng = np.random.default_rng(1)
    b, c = rng.standard_normal((6, 7)), rng.standard_normal((7, 5))
    program = compile_einsum("ik,kj->ij", [pack("B", b, DCSR), pack("C", c, dense(2))], Schedule(block=4))
    for engine in ("fast", "spec"):
        result = program.run(engine=engine)
        np.testing.assert_allclose(result.output, b @ c)
        assert result.regions["T"].node("matmul_T").flops == 8 * 2 * 4**3


def test_a_mask_of_part_of_a_block():
    ij = ("i", "j")
    statement = Statement("T", ij, "mask", (Access("S", ij), Access("m", ij)), fill=-np.inf)
    inputs = {"S": pack("S", np.ones((4, 4)), dense(2)), "m": pack("m", np.eye(4), DCSR)}
    einsums = EinsumProgram(
        {n: declare(t) for n, t in inputs.items()}, (statement,), ("T",), {"S": (4, 4), "m": (4, 4), "T": (4, 4)}
    )
    with pytest.raises(SparseError, match="not made of full blocks"):
        Program(einsums, Schedule(block=2), list(inputs), {}, list(inputs.values())).run(engine="spec")

"""Algorithm 1: fresh reductions, inlining, shared views, the partial order and its cycles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Statement, parse
from tilestream.sparse.fusion import fuse
from tilestream.sparse.orders.pog import PartialOrder
from tilestream.sparse.program import Program, compile_einsum, declare
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import compressed, pack


def chain():
    """A = B C, E = B A (figure 8): A is made row by row of k."""
    b = Access("B", ("i", "k"))
    statements = (
        Statement("A", ("i", "j"), "mul", (b, Access("C", ("k", "j"))), ("k",)),
        Statement("E", ("i", "j"), "mul", (b, Access("A", ("k", "j"))), ("k",)),
    )
    declared = Declared((4, 4), compressed(2))
    shapes = dict.fromkeys("ABCE", (4, 4))
    return EinsumProgram({"B": declared, "C": declared}, statements, ("E",), shapes)


def test_reductions_are_fresh_and_uses_are_views():
    program = chain()
    fused = fuse(program, program.statements, ["E"], program.inputs)
    assert [str(view) for view in fused.views] == ["B_ik", "B_kl", "C_lj", "A_kj", "E_ij"]
    assert set(fused.order.edges) == {("i", "k"), ("k", "l"), ("l", "j")}
    assert list(fused.order.orders()) == [("i", "k", "l", "j")]


def test_two_uses_with_one_binding_are_one_view():
    statements = (
        Statement("T", ("i", "j"), "square", (Access("X", ("i", "j")),)),
        Statement("S", ("i",), "copy", (Access("T", ("i", "j")),), ("j",)),
        Statement("Q", ("i", "j"), "div", (Access("T", ("i", "j")), Access("S", ("i",)))),
    )
    declared = Declared((3, 4), compressed(2))
    program = EinsumProgram({"X": declared}, statements, ("Q",), {"X": (3, 4), "T": (3, 4), "S": (3,), "Q": (3, 4)})
    fused = fuse(program, statements, ["Q"], program.inputs)
    assert [str(view) for view in fused.views] == ["X_ij", "T_ij", "S_i", "Q_ij"]
    assert fused.order.fixed == {"S"}
    with pytest.raises(SparseError, match="S reduces j inside i"):
        Program(program, Schedule(fuse="all", order=("j", "i")), ["X"])


def test_other_binding_is_another_view():
    statements = (
        Statement("T", ("i", "j"), "relu", (Access("X", ("i", "j")),)),
        Statement("G", ("i", "j"), "mul", (Access("T", ("i", "k")), Access("T", ("j", "k"))), ("k",)),
    )
    program = EinsumProgram(
        {"X": Declared((4, 5), compressed(2))}, statements, ("G",), {"X": (4, 5), "T": (4, 5), "G": (4, 4)}
    )
    fused = fuse(program, statements, ["G"], program.inputs)
    assert [str(view) for view in fused.views] == ["X_ik", "T_ik", "X_jk", "T_jk", "G_ij"]
    array = np.random.default_rng(0).standard_normal((4, 5)).round(1)
    made = Program(program, Schedule(fuse="all"), ["X"]).run(pack("X", array, compressed(2)), engine="spec").output
    np.testing.assert_allclose(made, np.maximum(array, 0) @ np.maximum(array, 0).T)


def test_cycle_is_resolved_by_a_permuted_copy():
    """T = B * C^T with both stored by rows: i before j and j before i."""
    array = np.arange(16.0).reshape(4, 4) % 3
    other = np.arange(16.0).reshape(4, 4) % 5
    operands = [pack("B", array, compressed(2)), pack("C", other, compressed(2))]
    program = compile_einsum("ij,ji->ij", operands)
    region = program.regions[0]
    assert region.order == ("i", "j") and any("cycle" in note for note in region.notes)
    assert region.inputs["C-1,0"] == ("C", program.regions[0].inputs["C-1,0"][1])
    np.testing.assert_array_equal(program.run(engine="spec").output, array * other.T)


def test_result_that_cannot_be_repeated_goes_through_memory():
    """The inner product's rows are a stream and cannot be had again for each i of the second product."""
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 2, (4, 4)).astype(float) for _ in range(3)]
    operands = [pack(n, a, compressed(2)) for n, a in zip("BCD", arrays, strict=True)]
    program = compile_einsum("ik,kj,jl->il", operands, Schedule(fuse="all", order=("k", "l", "i", "j")))
    assert len(program.regions) == 2 and "through memory" in str(program)
    np.testing.assert_array_equal(program.run(engine="spec").output, arrays[0] @ arrays[1] @ arrays[2])


def test_regions_by_name():
    operands = [pack(n, np.eye(3), compressed(2)) for n in "BCDE"]
    text = "ik,kj,jl,lm->im"
    unfused = compile_einsum(text, operands, Schedule(fuse="none"))
    assert [r.name for r in unfused.regions] == ["T0", "T1", "T"]
    partial = compile_einsum(text, operands, Schedule(fuse=(("T0", "T1"),)))
    assert [r.name for r in partial.regions] == ["T0..T1", "T"]
    with pytest.raises(SparseError, match="no statement or operator 'T9'"):
        compile_einsum(text, operands, Schedule(fuse=(("T9",),)))
    with pytest.raises(SparseError, match="need each other"):
        compile_einsum(text, operands, Schedule(fuse=(("T0", "T"),)))
    with pytest.raises(SparseError, match="two fusion regions"):
        compile_einsum(text, operands, Schedule(fuse=(("T0",), ("T0", "T1"))))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_orders_keep_every_edge_and_cycles_are_found(pairs):
    order = PartialOrder()
    for a, b in pairs:
        order.edge(str(a), str(b), "test") if a != b else order.add(str(a))
    found = list(order.orders(50))
    assert bool(found) == (not order.cycle())
    assert all(order.admits(one) and sorted(one) == sorted(order.indices) for one in found)
    assert len(set(found)) == len(found)
    if cycle := order.cycle():
        assert all((a, b) in order.edges for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))


def test_cap_on_orders_and_their_number():
    order = PartialOrder(list("abcdef"))
    assert len(list(order.orders())) == 20 and len(list(order.orders(1000))) == order.count() == 720
    order.edge("a", "b", "test")
    assert order.count() == len(list(order.orders(1000))) == 360
    assert PartialOrder([str(n) for n in range(16)]).count() == 20922789888000


def test_an_order_that_storage_does_not_have():
    """Figure 8 with both products in the order i, j, k: A is needed by columns, so that C is read by columns."""
    program, rng = chain(), np.random.default_rng(0)
    b, c = (rng.integers(0, 3, (4, 4)).astype(float) for _ in range(2))
    operands = [pack("B", b, compressed(2)), pack("C", c, compressed(2))]
    made = Program(program, Schedule(fuse="all", order=("i", "j", "k", "l")), ["B", "C"], {}, operands)
    assert made.regions[0].notes == ("C is read from a copy in the order j l",)
    np.testing.assert_array_equal(made.run(engine="spec").output, b @ (b @ c))


def test_schedule_prints_as_code():
    schedule = Schedule(fuse=(("A", "B"),), order={"A..B": ("i", "j")}, parallel={"i": 2}, block=1)
    assert eval(repr(schedule), {"Schedule": Schedule}) == schedule
    assert repr(Schedule()) == "Schedule()"
    for wrong in ({"fuse": "some"}, {"block": 0}, {"parallel": {"i": 0}}, {"max_orders": 0}):
        with pytest.raises(SparseError):
            Schedule(**wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [("ik,kj", "no einsum"), ("ik,kj,jl->il", "operands"), ("ii,kj->ij", "does not fit"), ("ik,kj->iz", "no operand")],
)
def test_text_that_is_no_einsum(text, message):
    declared = [(n, declare(pack(n, np.eye(3), compressed(2)))) for n in "BC"]
    with pytest.raises(SparseError, match=message):
        parse(text, declared)


def test_wrong_orders():
    operands = [pack(n, np.eye(3), compressed(2)) for n in "BC"]
    with pytest.raises(SparseError, match="lacks index 'k'"):
        compile_einsum("ik,kj->ij", operands, Schedule(order=("i", "j")))
    for wrong, message in (
        ({"parallel": {"z": 2}}, "names index 'z'"),
        ({"parallel": {"U:i": 2}}, "names region 'U'"),
        ({"order": {"U": ("i", "k", "j")}}, "names region 'U'"),
        ({"order": ("i", "k", "z", "j")}, "names index 'z'"),
    ):
        with pytest.raises(SparseError, match=message):
            compile_einsum("ik,kj->ij", operands, Schedule(**wrong))
    with pytest.raises(SparseError, match="not number 7"):
        compile_einsum("ik,kj->ij", operands, Schedule(order=7))

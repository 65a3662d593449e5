"""Fusion tables of worked examples, cell by cell."""

from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Statement
from tilestream.sparse.program import Program
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format, compressed

SPARSE = compressed(2)


def program(statements, inputs, outputs, order, fuse="all"):
    shapes = {name: declared.shape for name, declared in inputs.items()}
    sizes = {}
    for statement in statements:
        for access in statement.operands:
            sizes |= dict(zip(access.indices, shapes[access.tensor], strict=True))
        shapes[statement.name] = tuple(sizes[i] for i in statement.indices)
    einsums = EinsumProgram(inputs, tuple(statements), outputs, shapes)
    return Program(einsums, Schedule(fuse=fuse, order=order), list(inputs))


def neighbours():
    """GraphSAGE's neighbour term, T_ij = A_il X_lm W_mj (figure 20)."""
    statements = [
        Statement("T0", ("i", "m"), "mul", (Access("A", ("i", "l")), Access("X", ("l", "m"))), ("l",)),
        Statement("T", ("i", "j"), "mul", (Access("T0", ("i", "m")), Access("W", ("m", "j"))), ("m",)),
    ]
    inputs = {"A": Declared((5, 5), SPARSE), "X": Declared((5, 6), SPARSE), "W": Declared((6, 4), SPARSE)}
    return program(statements, inputs, ("T",), ("i", "l", "m", "j"))


FIGURE_20 = """
|     | A_il            | X_lm            | T0_im                  | W_mj             | T_ij         |
|-----|-----------------|-----------------|------------------------|------------------|--------------|
| i   | LS(root)        | Rep(root,<A_i>) | <A_i>                  | Rep(root,<T0_i>) | <T0_i>       |
| l   | LS(<A_i>) ∩     | ∩ LS(<X_i>)     | <T0_i>                 | <W_i>            | <T_i>        |
| m   | Rep(<A_l>,<X_m>) | LS(<X_l>)      | Red1_l ∩               | ∩ LS(<W_l>)      | <T_l>        |
| j   | <A_m>           | <X_m>           | <T0_m>[crd0]           | LS(<W_m>)        | Red1_m[crd0] |
| val | Val(<A_j>)      | Val(<X_j>)      | Rep(<T0_m>[val],<W_j>) | Val(<W_j>)       | Red1_m[val]  |
"""


def cells(text):
    rows = [line.strip().strip("|").split("|") for line in text.strip().splitlines()]
    return [[cell.strip() for cell in row] for row in rows if not row[0].strip().startswith("--")]


def test_figure_20():
    table = neighbours().regions[0].table
    assert cells(str(table)) == cells(FIGURE_20)
    assert table.cell("m", "T0_im") == "Red1_l ∩"


def test_drawn_table_lines_up():
    lines = str(neighbours().regions[0].table).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert neighbours().tables().startswith("T0..T\n|")


def test_inner_product_reduces_to_scalars():
    statements = [Statement("T", ("i", "j"), "mul", (Access("B", ("i", "k")), Access("C", ("k", "j"))), ("k",))]
    inputs = {"B": Declared((5, 6), SPARSE), "C": Declared((6, 4), Format(("compressed",) * 2, (1, 0)))}
    table = program(statements, inputs, ("T",), ("i", "j", "k")).regions[0].table
    assert cells(str(table))[1:] == [
        ["i", "LS(root)", "Rep(root,<B_i>)", "<B_i>"],
        ["j", "Rep(<B_i>,<C_j>)", "LS(<C_i>)", "<C_j>"],
        ["k", "LS(<B_j>) ∩", "∩ LS(<C_j>)", "<T_j>"],
        ["val", "Val(<B_k>)", "Val(<C_k>)", "Red0_k[val]"],
    ]


def test_sum_is_a_union_and_a_shared_operand_is_not_joined_with_itself():
    statements = [
        Statement("T", ("i", "j"), "add", (Access("A", ("i", "j")), Access("B", ("i", "j")))),
        Statement("S", ("i",), "copy", (Access("T", ("i", "j")),), ("j",)),
        Statement("Q", ("i", "j"), "div", (Access("T", ("i", "j")), Access("S", ("i",)))),
    ]
    inputs = {"A": Declared((5, 5), SPARSE), "B": Declared((5, 5), SPARSE)}
    table = program(statements, inputs, ("Q",), ("i", "j")).regions[0].table
    assert table.cell("i", "A_ij") == "LS(root) ∪" and table.cell("j", "B_ij") == "∪ LS(<B_i>)"
    assert table.cell("i", "Q_ij") == "<T_i>" and table.cell("val", "S_i") == "Rep(<S_i>[val],<T_j>)"


def test_outer_product_accumulates_two_levels():
    statements = [Statement("T", ("i", "j"), "mul", (Access("B", ("i", "k")), Access("C", ("k", "j"))), ("k",))]
    inputs = {"B": Declared((5, 6), Format(("compressed",) * 2, (1, 0))), "C": Declared((6, 4), SPARSE)}
    table = program(statements, inputs, ("T",), ("k", "i", "j")).regions[0].table
    assert [table.cell(row, "T_ij") for row in "kij"] == ["-", "Red2_k[crd1]", "Red2_k[crd0]"]

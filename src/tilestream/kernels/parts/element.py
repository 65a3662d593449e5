"""The body of a C++ function for one element, or for two neighbours: elementwise tile ops, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilestream.ir.axes import View
from tilestream.ir.pipeline import TileOp
from tilestream.kernels.parts.snippets import expression


def element_function(
    ops: Sequence[TileOp], values: Mapping[str, str], result: str, vector: Callable[[View], str]
) -> str:
    """``ops`` in order, from ``values`` (C++ of tiles) to the tile ``result``; loads are ``r[0]``, ``r[1]`` and so on.

    Args:
        vector: C++ of an element of a tensor without rows, a bias or a scalar.
    """
    statements, made = _statements(ops, values, result, vector, _one, "")
    return "\n".join([*statements, f"    return {made};"])


_TOGETHER = {"silu": "silu_pair"}
"""Functions that cost less for two values than twice (math.cuh)."""


def pair_function(ops: Sequence[TileOp], values: Mapping[str, str], result: str, vector: Callable[[View], str]) -> str:
    """The same for two neighbours, whose results are ``made[0]`` and ``made[1]``.

    C++ of a value is of neighbour ``[e]``: ``values``, what ``vector`` gives, and loads, ``r[e][0]`` and so on.
    """
    statements, made = _statements(ops, values, result, vector, _two, "[e]")
    return "\n".join([*statements, *(f"    made[{e}] = {made.replace('[e]', f'[{e}]')};" for e in range(2))])


def _one(op: TileOp, operands: list[str], name: str) -> list[str]:
    return [f"    const float {name} = {expression(op, operands)};"]


def _two(op: TileOp, operands: list[str], name: str) -> list[str]:
    def both(text: str) -> str:
        return ", ".join(text.replace("[e]", f"[{e}]") for e in range(2))

    if op.kind in _TOGETHER:
        return [f"    float {name}[2];", f"    {_TOGETHER[op.kind]}({both(operands[0])}, {name});"]
    return [f"    const float {name}[2] = {{{both(expression(op, operands))}}};"]


def _statements(
    ops: Sequence[TileOp],
    values: Mapping[str, str],
    result: str,
    vector: Callable[[View], str],
    statement: Callable[[TileOp, list[str], str], list[str]],
    element: str,
) -> tuple[list[str], str]:
    """What computes each of ``ops``, and C++ of the result; ``element`` picks a neighbour."""
    lines: list[str] = []
    known = dict(values)
    loads = 0
    for n, op in enumerate(ops):
        assert op.out is not None
        if op.kind == "load":
            known[op.out.name] = f"r{element}[{loads}]"
            loads += 1
            continue
        operands = [*(known[name] for name in op.ins), *(vector(view) for view in op.views[len(op.tiles) :])]
        lines += statement(op, operands, f"v{n}")
        known[op.out.name] = f"v{n}{element}"
    return lines, known[result]

"""Elementwise tile ops as C++ for two neighbouring elements, one op after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilestream.ir.axes import View
from tilestream.ir.pipeline import TileOp
from tilestream.kernels.parts.snippets import expression

_TOGETHER = {"silu": "silu_pair"}
"""Functions that cost less for two values than twice (math.cuh)."""


def pair_function(ops: Sequence[TileOp], values: Mapping[str, str], result: str, vector: Callable[[View], str]) -> str:
    """The body of a function: ``pair_statements``, with the tile ``result`` left in ``made[0]`` and ``made[1]``."""
    lines, known = pair_statements(ops, values, vector)
    lines += [f"made[{e}] = {neighbour(known[result], e)};" for e in range(2)]
    return "\n".join(f"    {line}" for line in lines)


def pair_statements(
    ops: Sequence[TileOp], values: Mapping[str, str], vector: Callable[[View], str]
) -> tuple[list[str], dict[str, str]]:
    """What computes ``ops`` in order from ``values`` (C++ of tiles), and C++ of every tile, ``values`` among them.

    C++ of a value is of neighbour ``[e]``: ``values``, what ``vector`` gives, and loads, ``r[e][0]`` and so on.

    Args:
        vector: C++ of an element of a tensor without rows, a bias or a scalar.
    """
    lines: list[str] = []
    known = dict(values)
    loads = 0
    for n, op in enumerate(ops):
        assert op.out is not None
        if op.kind == "load":
            known[op.out.name] = f"r[e][{loads}]"
            loads += 1
            continue
        operands = [*(known[name] for name in op.ins), *(vector(view) for view in op.views[len(op.tiles) :])]
        if op.kind in _TOGETHER:
            lines += [f"float v{n}[2];", f"{_TOGETHER[op.kind]}({_both(operands[0])}, v{n});"]
        else:
            lines.append(f"const float v{n}[2] = {{{_both(expression(op, operands))}}};")
        known[op.out.name] = f"v{n}[e]"
    return lines, known


def neighbour(text: str, e: int) -> str:
    """C++ of neighbour ``e``, of what is of neighbour ``[e]``."""
    return text.replace("[e]", f"[{e}]")


def _both(text: str) -> str:
    return ", ".join(neighbour(text, e) for e in range(2))

"""The body of a C++ function for one element, or for two neighbours: elementwise tile ops, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilestream.cuda.snippets import expression
from tilestream.ir.axes import View
from tilestream.ir.pipeline import TileOp


def element_function(
    ops: Sequence[TileOp], values: Mapping[str, str], result: str, vector: Callable[[View], str]
) -> str:
    """``ops`` in order, from ``values`` (C++ of tiles) to the tile ``result``; loads are ``r[0]``, ``r[1]`` and so on.

    Args:
        vector: C++ of an element of a tensor without rows, a bias or a scalar.
    """
    lines: list[str] = []
    known = dict(values)
    loads = 0
    for n, op in enumerate(ops):
        assert op.out is not None
        if op.kind == "load":
            known[op.out.name] = f"r[{loads}]"
            loads += 1
            continue
        operands = [*(known[name] for name in op.ins), *(vector(view) for view in op.views[len(op.tiles) :])]
        lines.append(f"    const float v{n} = {expression(op, operands)};")
        known[op.out.name] = f"v{n}"
    return "\n".join([*lines, f"    return {known[result]};"])


_TOGETHER = {"silu": "silu_pair"}
"""Functions that cost less for two values than twice (math.cuh)."""


def pair_function(ops: Sequence[TileOp], values: Mapping[str, str], result: str, vector: Callable[[View], str]) -> str:
    """The same for two neighbours, whose results are ``made[0]`` and ``made[1]``.

    C++ of a value is of neighbour ``[e]``: ``values``, what ``vector`` gives, and loads, ``r[e][0]`` and so on.
    """
    lines: list[str] = []
    known = dict(values)
    loads = 0

    def both(text: str) -> str:
        return ", ".join(text.replace("[e]", f"[{e}]") for e in range(2))

    for n, op in enumerate(ops):
        assert op.out is not None
        if op.kind == "load":
            known[op.out.name] = f"r[e][{loads}]"
            loads += 1
            continue
        operands = [*(known[name] for name in op.ins), *(vector(view) for view in op.views[len(op.tiles) :])]
        if op.kind in _TOGETHER:
            lines += [f"    float v{n}[2];", f"    {_TOGETHER[op.kind]}({both(operands[0])}, v{n});"]
        else:
            lines.append(f"    const float v{n}[2] = {{{both(expression(op, operands))}}};")
        known[op.out.name] = f"v{n}[e]"
    return "\n".join([*lines, *(f"    made[{e}] = {known[result].replace('[e]', f'[{e}]')};" for e in range(2))])

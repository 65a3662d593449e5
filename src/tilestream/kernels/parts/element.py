"""The body of a C++ function for two neighbouring elements: elementwise tile ops, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilestream.ir.axes import View
from tilestream.ir.pipeline import TileOp
from tilestream.kernels.parts.snippets import expression

_TOGETHER = {"silu": "silu_pair"}
"""Functions that cost less for two values than twice (math.cuh)."""


def pair_function(ops: Sequence[TileOp], values: Mapping[str, str], result: str, vector: Callable[[View], str]) -> str:
    """``ops`` in order, from ``values`` (C++ of tiles) to the tile ``result``, left in ``made[0]`` and ``made[1]``.

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
    lines += [f"made[{e}] = {known[result].replace('[e]', f'[{e}]')};" for e in range(2)]
    return "\n".join(f"    {line}" for line in lines)


def _both(text: str) -> str:
    return ", ".join(text.replace("[e]", f"[{e}]") for e in range(2))

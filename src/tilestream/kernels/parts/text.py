"""C++ text as lists of lines: blocks, loops, sums without zeros."""

from __future__ import annotations

from collections.abc import Iterable

UNROLL = "#pragma unroll"


def indented(lines: Iterable[str]) -> list[str]:
    return ["  " + line for line in lines]


def block(head: str, lines: Iterable[str]) -> list[str]:
    """``head { lines }``; without a head, a scope."""
    return [f"{head} {{" if head else "{", *indented(lines), "}"]


def loop(variable: str, count: int, lines: Iterable[str], pragma: str = UNROLL) -> list[str]:
    """``lines`` for ``variable`` from 0 to ``count``, exclusive; ``pragma``, if any, goes before the loop."""
    head = f"for (int {variable} = 0; {variable} < {count}; ++{variable})"
    return [*([pragma] if pragma else []), *block(head, lines)]


def plus(expression: str, number: int) -> str:
    """``expression + number``, or ``expression`` alone where there is nothing to add."""
    return f"{expression} + {number}" if number else expression

"""Numbers as people read them."""

from __future__ import annotations

WIDTH = 120
"""Columns of text that goes to no terminal."""


def microseconds(value: float | None) -> str:
    """Three significant digits or all before the point; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(value: int | None) -> str:
    """Bytes in binary units; empty for None."""
    if value is None:
        return ""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"


def percent(part: float, whole: float) -> str:
    """Never 100 % of what is not all, nor 0 % of what is something."""
    share = part / whole if whole else 0.0
    return ">99%" if 0.995 <= share < 1 else "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def count(n: int, what: str) -> str:
    """``1 region``, ``2 regions``."""
    return f"{n} {what}{'s' * (n != 1)}"


def shortened(words: tuple[str, ...], most: int = 3) -> str:
    """The first few different ones, and how many more there are."""
    unique = list(dict.fromkeys(w for w in words if w))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return "; ".join(unique[:most]) + more

"""Points that no other point beats in every objective, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TypeVar

Point = TypeVar("Point")


def front(points: Sequence[Point], objectives: Callable[[Point], tuple[float, ...]]) -> list[Point]:
    """The points that nothing dominates, all objectives being better when smaller; equals are kept once, in order."""
    kept: list[Point] = []
    seen: set[tuple[float, ...]] = set()
    for point in points:
        mine = objectives(point)
        if mine not in seen and not any(dominates(objectives(other), mine) for other in points):
            kept.append(point)
            seen.add(mine)
    return sorted(kept, key=objectives)


def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """``a`` is nowhere larger than ``b``, and somewhere smaller."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b


def plot(points: Sequence[tuple[str, float, float, float, bool]], labels: tuple[str, str, str]) -> str:
    """An SVG scatter on logarithmic axes: (title, x, y, size, on the front). ``labels``: what x, y and size are."""
    width, height, left, below = 640, 420, 84, 52
    xs = [max(1.0, p[1]) for p in points] or [1.0]
    ys = [max(1.0, p[2]) for p in points] or [1.0]
    sizes = [max(1.0, p[3]) for p in points] or [1.0]

    def at(value: float, among: Sequence[float], low: float, high: float) -> float:
        least, most = _log(min(among)), _log(max(among))
        share = 0.5 if most == least else (_log(max(1.0, value)) - least) / (most - least)
        return low + (high - low) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="ui-sans-serif,system-ui,sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<path d="M{left},20 V{height - below} H{width - 20}" fill="none" stroke="#8b94a3"/>',
    ]
    for value in sorted({min(xs), max(xs)}):
        x = at(value, xs, left + 24, width - 60)
        parts.append(f'<text x="{x:.0f}" y="{height - below + 18}" text-anchor="middle">{value:,.0f}</text>')
    for value in sorted({min(ys), max(ys)}):
        y = at(value, ys, height - below - 24, 44)
        parts.append(f'<text x="{left - 8}" y="{y:.0f}" text-anchor="end">{value:,.0f}</text>')
    parts.append(
        f'<text x="{(width + left) / 2:.0f}" y="{height - 10}" text-anchor="middle">{escape(labels[0])}</text>'
    )
    parts.append(f'<text x="{left}" y="14">{escape(labels[1])}; area: {escape(labels[2])}</text>')
    for title, x, y, size, best in points:
        radius = at(size, sizes, 4, 13)
        colour = "#b5482a" if best else "#9aa5b4"
        cx, cy = at(x, xs, left + 24, width - 60), at(y, ys, height - below - 24, 44)
        words = f"{title}\n{labels[0]} {x:,.0f}, {labels[1]} {y:,.0f}, {labels[2]} {size:,.0f}"
        parts.append(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.75">'
            f"<title>{escape(words)}</title></circle>"
        )
    return "".join([*parts, "</svg>"])


def _log(value: float) -> float:
    return math.log10(max(1.0, value))

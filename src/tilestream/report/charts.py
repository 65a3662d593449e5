"""Charts of the HTML report as inline SVG: a simulated timeline, and bars on a common scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilestream.report.drawing import COLOURS
from tilestream.report.timeline import by_worker, waits
from tilestream.report.words import microseconds
from tilestream.simulator import Simulation, Span

WIDTH = 1040
LEFT = 150
ROW = 19
MOST_ROWS = 28
STEPS_SHOWN = 8


def gantt(run: Simulation) -> str:
    """The start of a run: a row an SM, a bar a step, coloured by stage; waits are pale.

    Every stage shows its first replicas. The window holds the first steps, since a whole run has thousands.
    """
    workers = _workers(run)
    if not workers:
        return '<p class="note">Nothing runs: there are no rows.</p>'
    stages = list(dict.fromkeys(s.stage for s in run.spans))
    window = _window(run, workers)
    scale = (WIDTH - LEFT - 20) / window
    height = 34 + ROW * len(workers)
    parts = [
        f'<svg class="gantt" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="timeline of {escape(run.pipeline)}">',
    ]
    parts += _axis(window, scale, height)
    rows = {worker: index for index, worker in enumerate(workers)}
    for worker, index in rows.items():
        span = workers[worker]
        label = f"{span.stage}[{span.replica}]"
        parts.append(f'<text class="row" x="{LEFT - 8}" y="{index * ROW + 22}">{escape(_short(label))}</text>')
    for worker, spans in by_worker(run).items():
        if worker not in rows:
            continue
        for span in spans:
            for start, end, why in waits(span):
                if start < window:
                    parts.append(_idle(start, min(end, window), why, rows[worker] * ROW + 10, scale))
            if span.start_us < window:
                parts.append(_bar(span, rows[worker] * ROW + 10, window, scale, stages.index(span.stage) % COLOURS))
    return "".join([*parts, "</svg>"])


def _short(label: str) -> str:
    return label if len(label) <= 22 else "…" + label[-21:]


def _workers(run: Simulation) -> dict[int, Span]:
    """The workers to show, with a span of each: of every stage as many replicas as fit."""
    first: dict[int, Span] = {}
    for span in run.spans:
        first.setdefault(span.worker, span)
    stages = list(dict.fromkeys(s.stage for s in first.values()))
    each = max(1, min(8, MOST_ROWS // max(1, len(stages))))
    return {w: s for w, s in sorted(first.items()) if s.replica < each} if len(stages) <= MOST_ROWS else first


def _window(run: Simulation, workers: dict[int, Span]) -> float:
    """End of the last shown worker's first steps, in microseconds."""
    ends: dict[int, list[float]] = {}
    for span in run.spans:
        if span.worker in workers:
            ends.setdefault(span.worker, []).append(span.end_us)
    return max(e[min(len(e), STEPS_SHOWN) - 1] for e in ends.values())


def _axis(window: float, scale: float, height: int) -> list[str]:
    step = _nice(window / 8)
    made = []
    at = 0.0
    while at <= window:
        x = LEFT + at * scale
        made.append(f'<line class="grid" x1="{x:.1f}" y1="6" x2="{x:.1f}" y2="{height - 20}"/>')
        made.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}">{at:g} µs</text>')
        at = round(at + step, 9)
    return made


def _nice(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``value``."""
    power = 1e-6
    while power * 10 <= value:
        power *= 10
    return next(power * n for n in (1, 2, 5, 10) if power * n >= value)


def _idle(start: float, end: float, why: str, y: int, scale: float) -> str:
    title = f"waits for {why}: {end - start:.2f} µs"
    return (
        f'<rect class="wait" x="{LEFT + start * scale:.1f}" y="{y}" width="{max(0.5, (end - start) * scale):.1f}" '
        f'height="{ROW - 5}"><title>{escape(title)}</title></rect>'
    )


def _bar(span: Span, y: int, window: float, scale: float, colour: int) -> str:
    start, end = LEFT + span.start_us * scale, LEFT + min(span.end_us, window) * scale
    title = f"{span.stage}[{span.replica}] tile {span.tile}: {span.end_us - span.start_us:.2f} µs"
    return (
        f'<rect class="s{colour}" x="{start:.1f}" y="{y}" width="{max(0.6, end - start - 0.6):.1f}" '
        f'height="{ROW - 5}" rx="2"><title>{escape(title)}</title></rect>'
    )


@dataclass(frozen=True)
class Bar:
    """``label`` to its left, ``text`` to its right; ``series`` picks the colour."""

    label: str
    value: float
    text: str
    series: int = 0


def bars(items: Sequence[Bar], width: int = 520, left: int = 120, right: int = 96) -> str:
    """Horizontal bars from zero on one linear scale, with ``left`` and ``right`` for labels and texts."""
    most = max((b.value for b in items), default=0.0) or 1.0
    room = width - left - right
    height = 24 * len(items) + 4
    parts = [f'<svg class="bars" viewBox="0 0 {width} {height}" width="{width}" role="img">']
    for index, bar in enumerate(items):
        y = 24 * index + 4
        length = max(1.0, bar.value / most * room)
        parts.append(f'<text class="row" x="{left - 8}" y="{y + 12}">{escape(bar.label)}</text>')
        parts.append(
            f'<rect class="s{bar.series % COLOURS}" x="{left}" y="{y}" width="{length:.1f}" height="16" rx="2"/>'
        )
        parts.append(f'<text class="value" x="{left + length + 7:.1f}" y="{y + 12}">{escape(bar.text)}</text>')
    return "".join([*parts, "</svg>"])


def time_text(us: float | None) -> str:
    return "" if us is None else f"{microseconds(us)} µs"

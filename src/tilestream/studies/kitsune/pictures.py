"""Plots of a reproduction as PNG: traffic, speedups, regions, utilisation, sensitivity. No display is needed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tilestream.studies.kitsune import paper
from tilestream.studies.kitsune.outcome import Outcome
from tilestream.studies.kitsune.reproduce import Reproduction
from tilestream.studies.kitsune.summary import BASE, BULK, KITSUNE, KITSUNE_FIFO, MIXED, REUSE, VERTICAL, WHOLE, RowRuns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    **{BULK: "#7d8793", VERTICAL: "#d9822b", KITSUNE: "#2f6fb5", KITSUNE_FIFO: "#9ec3ea"},
    **{WHOLE: "#e3b64a", MIXED: "#3b9a6d"},
}
PAPER = {"edgecolor": "#1c2530", "facecolor": "none", "linewidth": 1.1}


def pictures(made: Reproduction) -> dict[str, bytes]:
    """PNG files by name, without the suffix."""
    drawn = {
        "traffic": _traffic(made),
        "speedup": _speedup(made),
        "regions": _regions(made),
        "utilisation": _quadrants(made),
        "timeline": _timeline(made),
    }
    if _variants(made):
        drawn["sensitivity"] = _sensitivity(made)
    return {name: png(figure) for name, figure in drawn.items()}


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
    return out.getvalue()


def _axes(rows: int = 1, columns: int = 1, width: float = 10.0, height: float = 3.6) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _labels(made: Reproduction) -> list[str]:
    named = {r.key: r.label for r in paper.TABLE2}
    return [named[r.key] for r in made.rows]


def _ticks(axis: Axes, labels: Sequence[str]) -> None:
    axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right")


def _legend(figure: Figure, axis: Axes) -> None:
    """Above the axes, where no bar is."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside upper center")


def _traffic(made: Reproduction) -> Figure:
    figure, (axis,) = _axes()
    stated = {r.key: r for r in paper.TABLE2}
    for shift, execution in ((-0.2, VERTICAL), (0.2, KITSUNE)):
        at = [i + shift for i in range(len(made.rows))]
        axis.bar(at, [r.reduction(execution) for r in made.rows], 0.38, color=COLOURS[execution], label=execution)
        theirs = [getattr(stated[r.key], f"traffic_{execution}") for r in made.rows]
        axis.bar(at, theirs, 0.38, label="paper" if execution == KITSUNE else None, **PAPER)
    _ticks(axis, _labels(made))
    axis.set_ylabel("off-chip traffic saved, %")
    _legend(figure, axis)
    return figure


def _speedup(made: Reproduction) -> Figure:
    figure, (axis,) = _axes()
    for place, execution in enumerate((VERTICAL, KITSUNE_FIFO, KITSUNE, WHOLE, MIXED)):
        at = [i + 0.16 * (place - 2) for i in range(len(made.rows))]
        axis.bar(at, [r.speedup(execution) for r in made.rows], 0.15, color=COLOURS[execution], label=execution)
    axis.axhline(1, color="#7d8793", linewidth=0.8)
    _ticks(axis, _labels(made))
    axis.set_ylabel("times as fast as bulk")
    _legend(figure, axis)
    return figure


def _regions(made: Reproduction) -> Figure:
    figure, (axis,) = _axes()
    for at, row in enumerate(made.rows):
        parts = row.regions()
        if not parts:
            continue
        most = max(x.bulk_s for x in parts)
        spread = [at + 0.5 * (i / max(1, len(parts) - 1) - 0.5) if len(parts) > 1 else at for i in range(len(parts))]
        colours = ["#b3476b" if x.phase == "backward" else COLOURS[KITSUNE] for x in parts]
        sizes = [12 + 90 * x.bulk_s / most for x in parts]
        axis.scatter(spread, [x.speedup for x in parts], s=sizes, c=colours, alpha=0.75, linewidths=0)
    axis.axhline(1, color="#7d8793", linewidth=0.8)
    axis.set_yscale("log")
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
    _ticks(axis, _labels(made))
    axis.set_ylabel("speedup of a region")
    return figure


def _quadrants(made: Reproduction) -> Figure:
    figure, axes = _axes(1, 2, height=3.8)
    parts = (
        ("both_low", "both low", "#b3476b"),
        ("only_dram_low", "only DRAM low", "#2f6fb5"),
        ("only_sm_low", "only SM low", "#d9822b"),
        ("neither", "neither low", "#3b9a6d"),
    )
    for axis, execution in zip(axes, (BULK, KITSUNE), strict=True):
        base = [0.0] * len(made.rows)
        for name, label, colour in parts:
            shares = [100 * getattr(r.runs[BASE, execution].quadrants(), name) for r in made.rows]
            axis.bar(range(len(shares)), shares, 0.7, bottom=base, color=colour, label=label)
            base = [a + b for a, b in zip(base, shares, strict=True)]
        _ticks(axis, _labels(made))
        axis.set_title(execution, fontsize=10)
    axes[0].set_ylabel("share of the run time, %")
    axes[1].legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return figure


def _timeline(made: Reproduction) -> Figure:
    """Bulk and Kitsune, of the row that Kitsune speeds up most."""
    row = max(made.rows, key=RowRuns.speedup)
    named = dict(zip([r.key for r in made.rows], _labels(made), strict=True))
    return timeline({e: row.runs[BASE, e] for e in (BULK, KITSUNE)}, named[row.key])


def timeline(runs: Mapping[str, Outcome], title: str = "") -> Figure:
    """Each resource over time, one run above the other on one time axis."""
    figure, axes = _axes(len(runs), 1, height=1.0 + 1.8 * len(runs))
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        for what, colour in (("tensor", "#2f6fb5"), ("simt", "#d9822b"), ("dram", "#b3476b")):
            edges = [1e6 * start for start, _, _ in run.utilisation] + [1e6 * x[1] for x in run.utilisation[-1:]]
            values = [100 * busy.get(what, 0.0) for _, _, busy in run.utilisation]
            if values:
                axis.stairs(values, edges, color=colour, label=what, fill=True, alpha=0.45, linewidth=0)
        axis.set_xlim(0, 1e6 * max(x.time_s for x in runs.values()))
        axis.set_ylim(0, 105)
        axis.set_ylabel(f"{name}\nbusy, %")
    axes[0].set_title(title, fontsize=10, loc="left")
    _legend(figure, axes[0])
    axes[-1].set_xlabel("microseconds")
    return figure


def _variants(made: Reproduction) -> list[str]:
    """Variants of the hardware, without the base."""
    return [v for v in dict.fromkeys(v for r in made.rows for v, _ in r.runs) if v not in (BASE, REUSE)]


def _sensitivity(made: Reproduction) -> Figure:
    variants = _variants(made)
    figure, axes = _axes(len(variants), 1, height=2.4 * len(variants) + 0.6)
    for axis, variant in zip(axes, variants, strict=True):
        for shift, execution in ((-0.27, BULK), (0.0, VERTICAL), (0.27, KITSUNE)):
            gains = [r.gain(execution, variant) for r in made.rows]
            at = [i + shift for i in range(len(gains))]
            axis.bar(at, gains, 0.26, color=COLOURS[execution], label=execution)
        _ticks(axis, _labels(made))
        axis.set_title(variant, fontsize=11, loc="left")
        axis.set_ylabel("gain, %")
    _legend(figure, axes[0])
    return figure


ALT = {
    "traffic": "Off-chip traffic that vertical fusion and Kitsune save, by row of Table 2. Outlines: the paper.",
    "speedup": "End-to-end speedup over bulk, by row of Table 2. Pale: Kitsune's pipelines on one arbiter.",
    "regions": "Speedup of every region. Area: its share of bulk time. Red: backward.",
    "utilisation": "Share of the run time by which of SM and DRAM are below a third of their peak.",
    "timeline": "Busy share of each resource over time, bulk above Kitsune, of the row with the largest speedup.",
    "sensitivity": "What each execution gains from more hardware.",
}

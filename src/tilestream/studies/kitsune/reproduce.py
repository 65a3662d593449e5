"""The evaluation of the Kitsune paper as one call: Table 2, speedups, utilisation and sensitivity, beside the paper's.

Every row of Table 2 is captured once, designed for bulk, vertical fusion and Kitsune, and simulated on a device and on
its variants. Rows are independent: they run in parallel processes through joblib.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilestream import devices
from tilestream.errors import OptionError
from tilestream.studies.kitsune import paper, reasons, summary
from tilestream.studies.kitsune.parallel import each
from tilestream.studies.kitsune.summary import (
    BASE,
    BULK,
    KITSUNE,
    KITSUNE_FIFO,
    MIXED,
    OLDER,
    REUSE,
    VARIANTS,
    VERTICAL,
    WHOLE,
    RowRuns,
    variant_of,
)

EXECUTIONS = (BULK, VERTICAL, KITSUNE)

PAPERS_DEVICE = "a100"


@dataclass(frozen=True)
class Reproduction:
    """All rows that were run, and the figures of the text that they suffice for."""

    device: str
    rows: tuple[RowRuns, ...]
    figures: dict[str, summary.Span]
    seconds: float

    def json(self) -> dict[str, Any]:
        """``rows`` (Table 2), ``figures`` (the text), ``low`` (both low, by cause), ``runs`` (each simulation) and
        ``regions``."""
        stated = {r.key: r for r in paper.TABLE2}
        return {
            "device": self.device,
            "seconds": self.seconds,
            "rows": [_row(r, stated[r.key]) for r in self.rows],
            "figures": [
                {
                    "key": f.key,
                    "what": f.what,
                    "paper": f.text(),
                    "source": f.source,
                    "ours": list(self.figures[f.key]),
                    "unit": f.unit,
                    "agrees": f.holds(*self.figures[f.key]) if f.stated else None,
                    "near": f.nears(*self.figures[f.key]) if f.stated else None,
                    # the texts are about the paper's device; its counts and traffic hold on every other
                    "why": reasons.figure(f, self.figures[f.key]) if self.device == PAPERS_DEVICE else "",
                }
                for f in (*paper.FIGURES, *paper.UNREADABLE)
                if f.key in self.figures
            ],
            "low": {m: {c: list(v) for c, v in of.items()} for m, of in summary.low_means(self.rows).items()},
            "runs": [{"variant": v, **run.json()} for r in self.rows for (v, _), run in r.runs.items()],
            "regions": [
                {"app": r.app, "mode": r.mode, "region": x.name, "ops": list(x.ops), "phase": x.phase}
                | {"bulk_us": x.bulk_s * 1e6, "kitsune_us": x.seconds * 1e6, "speedup": x.speedup, "limit": x.limit}
                for r in self.rows
                for x in r.regions()
            ],
        }


def _row(ours: RowRuns, stated: paper.Table2Row) -> dict[str, Any]:
    made = {
        "app": ours.app,
        "mode": ours.mode,
        "operators": ours.operators,
        "fused_vertical": ours.fused[VERTICAL],
        "fused_kitsune": ours.fused[KITSUNE],
        "traffic_vertical": ours.reduction(VERTICAL),
        "traffic_kitsune": ours.reduction(KITSUNE),
        "speedup": ours.speedup(),
        "speedup_vertical": ours.speedup(VERTICAL),
        "speedup_whole": ours.speedup(WHOLE),
        "speedup_mixed": ours.speedup(MIXED),
        "speedup_one_arbiter": ours.speedup(KITSUNE_FIFO),
        "speedup_l2_reuse": ours.speedup(KITSUNE, REUSE) if (REUSE, KITSUNE) in ours.runs else None,
        "label": stated.label,
        "paper": {name: getattr(stated, name) for name in paper.COLUMNS},
        "speedup_40gb": ours.speedup(KITSUNE, OLDER) if (OLDER, KITSUNE) in ours.runs else None,
        "others": [asdict(x) for x in ours.others],
        "low": {cause: [100 * share for share in shares] for cause, shares in ours.low.items()},
        "unfused": dict(ours.unfused),
        "other_counts": dict(ours.other_counts),
    }
    made["why"] = reasons.row(made)
    return made


def reproduce(
    device: str = PAPERS_DEVICE,
    apps: Iterable[str] = (),
    modes: Iterable[str] = (),
    jobs: int = -1,
    variants: Sequence[str] = tuple(VARIANTS),
    progress: Callable[[str], None] = lambda _: None,
) -> Reproduction:
    """Run Table 2's rows of ``apps`` and ``modes`` (all of them if empty) on ``device``.

    Args:
        jobs: processes; -1 is one a core. A joblib back end that is set around the call takes over.
        variants: of ``VARIANTS``; the base is always run.

    Raises:
        OptionError: no row of Table 2 has that app or mode, or a variant is unknown.
        DeviceError: the device is unknown.
    """
    started = time.perf_counter()
    rows = chosen(apps, modes)
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown:
        raise OptionError(f"unknown variant {unknown[0]!r}", f"use some of: {', '.join(VARIANTS)}")
    devices.get(device)
    variants = [v for v in VARIANTS if v == BASE or v in variants and (v != OLDER or device == PAPERS_DEVICE)]
    tasks = [(r.app, r.mode, device, variants) for r in sorted(rows, key=lambda r: -r.operators)]
    rows_made = each(
        run_row, tasks, jobs, progress, lambda r: f"{r.key}: {r.speedup():.2f}x", lambda app, mode, *_: f"{app} {mode}"
    )
    made = {r.key: r for r in rows_made}
    ordered = tuple(made[r.key] for r in rows)
    return Reproduction(device, ordered, summary.figures(ordered), time.perf_counter() - started)


def chosen(apps: Iterable[str], modes: Iterable[str]) -> list[paper.Table2Row]:
    """Rows of Table 2 of these apps and modes; of all, where none is named."""
    apps, modes = list(apps), list(modes)
    for given, known in ((apps, {r.app for r in paper.TABLE2}), (modes, {r.mode for r in paper.TABLE2})):
        for name in given:
            if name not in known:
                raise OptionError(f"Table 2 has no {name!r}", f"use some of: {', '.join(sorted(known))}")
    rows = [r for r in paper.TABLE2 if (not apps or r.app in apps) and (not modes or r.mode in modes)]
    if not rows:
        raise OptionError(f"Table 2 has no row of {', '.join(apps)} in {', '.join(modes)}", "name another mode")
    return rows


def run_row(app: str, mode: str, device: str, variants: Sequence[str]) -> RowRuns:
    """Capture, design and simulate one row of Table 2; also by other choices, and, with more variants than the base,
    with what may move the share of time in which nothing is busy."""
    from tilestream.studies.kitsune import choices, design, low
    from tilestream.studies.kitsune.compiler.traffic import traffic as traffic_of
    from tilestream.studies.kitsune.evaluate import evaluate
    from tilestream.studies.kitsune.graphs import table2_graph
    from tilestream.studies.kitsune.table2 import other_counts

    graph = table2_graph(app, mode)
    phases = {op.name: str(op.phase) for op in graph.operators}
    runs, fused, traffic, unfused = {}, {}, {}, {}
    for variant in variants:
        for execution in EXECUTIONS if variant != BASE else (*EXECUTIONS, WHOLE, MIXED):
            machine = variant_of(device, VARIANTS[variant], execution in (KITSUNE, MIXED))
            made = design(graph, machine, execution, reuse=variant == REUSE)
            names = {"app": app, "mode": mode, "execution": execution}
            runs[variant, execution] = evaluate(made.workload, machine, phases=phases, **names)
            if variant == BASE:
                fused[execution], traffic[execution] = made.fused, made.traffic_bytes
            if variant == BASE and execution == VERTICAL:
                traffic[execution] = traffic_of(graph, made.units, saves=False)
            if variant == BASE and execution == KITSUNE:
                unfused = {e.op: e.reason for e in made.selection.exclusions}
                names["execution"] = KITSUNE_FIFO
                stock = variant_of(device, VARIANTS[variant], False)
                runs[variant, KITSUNE_FIFO] = evaluate(made.workload, stock, phases=phases, **names)
    counts = other_counts(graph) if mode == paper.TRAINING else {}
    others = tuple(choices.others(app, mode, graph, device))
    causes = low.causes(app, mode, graph, device) if len(variants) > 1 else {}
    return RowRuns(app, mode, len(graph.operators), fused, traffic, runs, unfused, counts, others, causes)

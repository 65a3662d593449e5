"""Tables of docs/few-rows.md, from ``benchmarks/results/few_rows.json`` and ``decoders.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from make_tables import table

from tilestream.bench import collectives as timed_collectives
from tilestream.plan.passes.share_tile import Split
from tilestream.schedule.shared_tile import Tail
from tilestream.studies.flashfuser import generated, paper
from tilestream.studies.flashfuser.measured import ROWS, is_ours

RESULTS = Path(__file__).parent / "results"
NAMES = {"addmm_activation": "cuBLAS", "max-autotune": "max-autotune", "inductor": "Inductor", "eager": "eager"}
SETTINGS = ("warm_us", "cold_us")
OTHERS = ("eager", "inductor", "max-autotune")

Row = dict[str, Any]


def tables() -> dict[str, str]:
    """Marker to what stands under it."""
    made = {"shapes": shapes(), "rows": other_rows(), "errors": errors(), "blocks": blocks(), "models": models()}
    return {**made, "collectives": collectives()}


def ablation() -> str:
    """Microseconds by arm of ``few_rows_ablation.json``, weights from DRAM: the best of each arm, of random kernels the
    median."""
    path = RESULTS / "few_rows_ablation.json"
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    heads = list(dict.fromkeys(r["arm"] for r in rows))
    lines = []
    for name, count in dict.fromkeys((r["workload"], r["rows"]) for r in rows):
        cells = [name, str(count)]
        for arm in heads:
            us = [r["cold_us"] for r in rows if (r["workload"], r["rows"], r["arm"]) == (name, count, arm)]
            best = median(us) if us and arm == "random" else min(us, default=0.0)
            cells.append(f"{best:.2f}" if us else "-")
        lines.append(cells)
    return table(["", "rows", *heads], lines) if rows else "Not measured."


def collectives() -> str:
    """Microseconds and GB/s an SM of ``collectives.json``: a line a collective and tile, by size of the cluster."""
    rows = timed_collectives.load(RESULTS / "collectives.json")
    lines = []
    for kind, size in dict.fromkeys((r.kind, r.tile_bytes) for r in sorted(rows, key=lambda r: (r.kind, r.tile_bytes))):
        by = {r.peers: f"{r.us:.2f} ({r.gb_per_s:.0f})" for r in rows if (r.kind, r.tile_bytes) == (kind, size)}
        lines.append([kind, f"{size:,}", *(by.get(peers, "-") for peers in timed_collectives.PEERS)])
    heads = ["collective", "bytes of a tile", *(f"{peers} CTAs" for peers in timed_collectives.PEERS)]
    return table(heads, lines) if rows else "Not measured."


def shapes() -> str:
    """Every workload at 128 rows: the best other, and ours with its sums in any order and in one order."""
    lines = []
    for name in (w.key for w in paper.WORKLOADS):
        rows = _of(name, ROWS)
        if rows:
            lines.append([_title(name), *_beside(rows)])
    heads = ["block: hidden, k, out", "other", "", "any order", "gain", "same bits", "gain", "groups x CTAs"]
    return table(heads, lines)


def other_rows() -> str:
    """The same at other numbers of rows."""
    lines = []
    for name in (w.key for w in paper.WORKLOADS):
        for count in sorted({r["rows"] for r in generated.rows_of() if r["workload"] == name} - {ROWS}):
            lines.append([name, str(count), *_beside(_of(name, count))])
    return table(["", "rows", "other", "", "any order", "gain", "same bits", "gain", "groups x CTAs"], lines)


def _beside(rows: Sequence[Row]) -> list[str]:
    others = [r for r in rows if not r["arm"].startswith(("shared", "tilestream"))]
    ours = [r for r in rows if is_ours(r["arm"])]
    fixed = [r for r in ours if _split(r).tail is not Tail.REDUCE_ADD]
    names = " / ".join(dict.fromkeys(_arm(min(others, key=lambda r, s=s: r[s])["arm"]) for s in SETTINGS))
    best = [min(r[s] for r in others) for s in SETTINGS]
    cells = [_pair(best), names]
    for some in (ours, fixed):
        cells += [_times(_best(some)), _gain(best, _best(some))] if some else ["-", ""]
    return [*cells, "; ".join(dict.fromkeys(_shape(_best(some)) for some in (ours, fixed) if some))]


def errors() -> str:
    """The cost model against every generated kernel, weights from DRAM."""
    lines = [
        [
            s.shape,
            str(s.rows),
            "held out" if s.held_out else "fitted",
            str(s.count),
            f"{s.error:.1%}",
            str(s.rank),
            f"{s.lost:.1%}",
        ]
        for s in generated.scores()
    ]
    return table(["shape", "rows", "", "kernels", "mean error", "place of the true best", "lost"], lines)


def blocks() -> str:
    """Norm, FFN and residual through torch.compile."""
    return _compiled(lambda r: "blocks" in r["detail"])


def models() -> str:
    """Decoders and BERT through torch.compile."""
    return _compiled(lambda r: "layers" in r["detail"])


def _compiled(wanted: Callable[[Row], bool]) -> str:
    path = RESULTS / "decoders.json"
    rows = [r for r in json.loads(path.read_text())["rows"] if wanted(r)] if path.exists() else []
    lines = []
    for case, count in dict.fromkeys((r["case"], r["rows"]) for r in rows):
        us = {r["arm"]: r["us"] for r in rows if (r["case"], r["rows"]) == (case, count)}
        if "tilestream" not in us:
            continue
        best = min(us[arm] for arm in OTHERS if arm in us)
        cells = [f"{us[arm]:.1f}" if arm in us else "-" for arm in (*OTHERS, "tilestream")]
        lines.append([case, str(count), *cells, f"{best / us['tilestream']:.2f}"])
    return table(["", "rows", *(NAMES[arm] for arm in OTHERS), "tilestream", "gain"], lines)


def _of(name: str, rows: int) -> list[Row]:
    return [r for r in generated.rows_of() if (r["workload"], r["rows"]) == (name, rows)]


def _title(name: str) -> str:
    c = next(w.chain for w in paper.WORKLOADS if w.key == name)
    return f"{name}: {c.n}, {c.k}, {c.l}" + (", gated" if c.branches == 2 else "")


def _arm(arm: str) -> str:
    return NAMES.get(arm, arm)


def _split(row: Row) -> Split:
    found = generated.split_of(row["arm"], row["rows"])
    assert found is not None, row["arm"]
    return found


def _best(rows: Sequence[Row]) -> dict[str, Row]:
    """Of each setting."""
    return {s: min(rows, key=lambda r: r[s]) for s in SETTINGS}


def _shape(found: dict[str, Row]) -> str:
    split = _split(found["warm_us"])
    rows = f"{split.row_tiles} x " if split.row_tiles > 1 else ""
    by = " by cluster" if split.tail is Tail.CLUSTER else ""
    return f"{rows}{split.groups} x {split.columns}{by}"


def _pair(values: Sequence[float]) -> str:
    return " / ".join(f"{v:.2f}" for v in values)


def _times(found: dict[str, Row]) -> str:
    return _pair([found[s][s] for s in SETTINGS])


def _gain(best: Sequence[float], found: dict[str, Row]) -> str:
    return _pair([b / found[s][s] for b, s in zip(best, SETTINGS, strict=True)])

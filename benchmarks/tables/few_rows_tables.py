"""Tables of docs/few-rows.md and docs/few-rows-results.md, from ``few_rows.json`` and ``decoders.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import geometric_mean, median
from typing import Any

from benchmarks.lib.few_rows_workloads import WORKLOADS
from benchmarks.lib.marked import table
from benchmarks.lib.places import RESULTS
from benchmarks.tables import decoder_tables
from tilestream.bench import collectives as timed_collectives
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split
from tilestream.studies.flashfuser import generated, paper
from tilestream.studies.flashfuser.measured import ROWS, few_rows, is_ours

NAMES = {"addmm_activation": "cuBLAS", "max-autotune": "max-autotune", "inductor": "Inductor", "eager": "eager"}
SETTINGS = ("warm_us", "cold_us")

Row = dict[str, Any]


def tables() -> dict[str, str]:
    """Marker to what stands under it."""
    made = {"shapes": shapes(), "rows": other_rows(), "errors": errors()}
    made |= {"blocks": table(*decoder_tables.compiled("blocks")), "models": table(*decoder_tables.compiled("layers"))}
    made |= {"tuned": decoder_tables.against_tuned(), "options": table(*decoder_tables.options())}
    made |= {"choices": choices(), "exchanges": by_exchange(), "counted bytes": counted_bytes()}
    return {**made, "collectives": collectives(), "clocks": clocks()}


def counted_bytes() -> str:
    """Megabytes of one call of each workload, of ``traffic.json``: Inductor's and ours by formulas, ours by Nsight
    Compute."""
    cases = json.loads((RESULTS / "traffic.json").read_text(encoding="utf-8"))["cases"]
    lines = []
    for name in WORKLOADS:
        if "planned" not in (one := cases.get(name, {})):
            continue
        levels, counted = one["planned"]["levels"], one.get("counted", {}).get("tilestream", {})
        dsm = one.get("dsm", {}).get("tilestream", {}).get("cold", {}).get("dsm")
        states = [counted.get(state) for state in ("cold", "warm")]
        dram = [None if s is None else s["read"] + s["written"] for s in states]
        cells = [one["planned"]["inductor"], levels["dram"], *dram, levels["l2"], states[0] and states[0]["l2"]]
        lines.append([name, *map(_megabytes, (*cells, levels.get("dsm", 0), dsm))])
    heads = ["MB", "Inductor: DRAM", "ours: DRAM", "counted, cold", "warm", "L2", "counted, cold ", "DSM", "counted"]
    return table(heads, lines) if lines else "Not measured."


def _megabytes(count: float | None) -> str:
    """A dash where nothing was counted."""
    return "-" if count is None else f"{count / 1e6:.1f}"


TAILS = {
    "sums added in any order": "any order",
    "partial sums in order": "in order",
    "sums over a cluster": "by cluster",
    "sums in one place": "one group",
}
KINDS = (*(f"L2, {tail}" for tail in TAILS.values()), "cluster, any order", "cluster, in order")
"""What the middle goes over, and what becomes of the groups' sums."""
DEPTHS = tuple(f"stages of {depth}" for depth in (64, 128, 256))


def ablation() -> str:
    """Microseconds of ``few_rows_ablation.json``, weights from DRAM: of random kernels the median, of the planner's and
    of every kind the best kernel of all that were timed, of ring stages the best grid's."""
    heads = ("library", "random", "planner", *KINDS, *DEPTHS)
    lines = [
        [name, str(count), *(f"{best[arm]:.2f}" if arm in best else "-" for arm in heads)]
        for (name, count), best in _ablated().items()
    ]
    return table(["", "rows", *heads], lines) if lines else "Not measured."


def ablation_means() -> str:
    """The same over library calls: geometric means over shapes, by rows."""
    found, lines = _ablated(), []
    arms = {
        "all": KINDS,
        "sums in one order": (*KINDS[1:4], KINDS[5]),
        "random": ("random",),
        "no DSM": KINDS[:2] + KINDS[3:4],
        "C over DSM": KINDS[4:],
    }
    for count in sorted({rows for _, rows in found}, reverse=True):
        here = [best for (_, rows), best in found.items() if rows == count]
        cells = []
        for some in arms.values():
            gains = [b["library"] / min(b[k] for k in some if k in b) for b in here if any(k in b for k in some)]
            cells.append(f"{geometric_mean(gains):.2f} ({len(gains)})" if gains else "-")
        lines.append([str(count), *cells])
    return table(["rows", *(f"{arm} (shapes)" for arm in arms)], lines) if lines else "Not measured."


def _ablated() -> dict[tuple[str, int], dict[str, float]]:
    """By workload and rows: arm or kind to microseconds."""
    path = RESULTS / "few_rows_ablation.json"
    us: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
        here = us.setdefault((row["workload"], row["rows"]), {})
        here.setdefault(row["arm"], []).append(row["cold_us"])
        if row["arm"] != "library":
            here.setdefault(_kind(row["split"]), []).append(row["cold_us"])
    return {
        case: {arm: median(some) if arm == "random" else min(some) for arm, some in here.items()}
        for case, here in sorted(us.items(), key=lambda each: (-each[0][1], each[0][0]))
    }


def _kind(split: str) -> str:
    tail = next(short for words, short in TAILS.items() if words in split)
    return f"{'cluster' if 'middle over a cluster' in split else 'L2'}, {tail}"


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


def choices() -> str:
    """What ``torch.compile`` takes at 128 rows, sums in one order and in any, which kernel it chose, and the others."""
    lines = []
    for name, rows in _at_128():
        planned = {r["arm"]: r for r in rows if r["arm"].startswith("tilestream")}
        if not planned:
            continue
        best = [min(r[s] for r in rows if r["arm"] in ARMS_OF_OTHERS) for s in SETTINGS]
        cells = [_pair([r[s] for s in SETTINGS]) if (r := _named(rows, arm)) else "-" for arm in ARMS_OF_OTHERS]
        for arm in ("tilestream", "tilestream, any order"):
            r = planned[arm]
            gains = _pair([b / r[s] for b, s in zip(best, SETTINGS, strict=True)])
            cells += [_pair([r[s] for s in SETTINGS]), gains, r["detail"].removeprefix("shared (").removesuffix(")")]
        lines.append([name, *cells])
    heads = [NAMES[arm] for arm in ARMS_OF_OTHERS]
    return table(["", *heads, "one order", "gain", "kernel", "any order", "gain", "kernel"], lines)


ARMS_OF_OTHERS = ("eager", "addmm_activation", "inductor", "max-autotune")


def by_exchange() -> str:
    """The best kernel of those that were timed at 128 rows, by what CTAs hand the middle over through."""
    lines = []
    for name, rows in _at_128():
        cells = []
        for any_order in (False, True):
            for middle in Middle:
                some = [r for r in rows if is_ours(r["arm"]) and _split(r).middle is middle]
                some = [r for r in some if (_split(r).tail is Tail.REDUCE_ADD) is any_order]
                if not (any_order and middle is Middle.NONE):
                    cells.append(_times(_best(some)) if some else "-")
        lines.append([name, *cells])
    heads = ["no exchange", "L2", "DSM", "L2, any order", "DSM, any order"]
    return table(["", *heads], lines)


def _at_128() -> list[tuple[str, list[Row]]]:
    found = [(w.key, _of(w.key, ROWS)) for w in paper.WORKLOADS]
    return [(name, rows) for name, rows in found if rows]


def _named(rows: Sequence[Row], arm: str) -> Row | None:
    return next((r for r in rows if r["arm"] == arm), None)


def other_rows() -> str:
    """The same at other numbers of rows."""
    lines = []
    for name in (w.key for w in paper.WORKLOADS):
        for count in sorted({r["rows"] for r in few_rows() if r["workload"] == name} - {ROWS}):
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


PHASES = ("rows made", "rows there", "first stage", "first sum", "middle stored", "middle back", "second sum", "ended")


def clocks() -> str:
    """``few_rows_phases.json``: microseconds from a CTA's start, medians over the CTAs, and from launch to launch."""
    path = RESULTS / "few_rows_phases.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    lines = []
    for r in rows:
        normed = "rows there" in r["marks"]
        marks = [r["marks"].get(name) for name in PHASES]
        cells = [f"{at[0]:.2f}" if at and (normed or i > 1) else "-" for i, at in enumerate(marks)]
        lines.append([r["case"], r["split"], *cells, f"{r['us']:.2f}"])
    return table(["", "kernel", *PHASES, "launch to launch"], lines) if lines else "Not measured."


def fused_by_others() -> str:
    """What others fuse at 128 rows: microseconds, weights warm / from DRAM, of a workload in one process."""
    rows = [r for r in few_rows() if r["rows"] == ROWS]
    heads = ("two kernels", "b2b_gemm_pass", "CUTLASS 13", "CUTLASS 45", "one kernel of ours")
    arms = (("eager", "addmm", "inductor", "max-autotune"), ("b2b",), ("CUTLASS 13",), ("CUTLASS 45",), ("shared",))
    lines = []
    for name in (w.key for w in paper.WORKLOADS):
        cells = []
        for starts in arms:
            some = [r for r in rows if r["workload"] == name and r["arm"].startswith(starts)]
            cells.append(_pair([min(r[s] for r in some) for s in SETTINGS]) if some else "-")
        if set(cells[1:4]) != {"-"}:
            lines.append([_title(name), *cells])
    return table(["", *heads], lines) if lines else "Not measured."


def _of(name: str, rows: int) -> list[Row]:
    return [r for r in few_rows() if (r["workload"], r["rows"]) == (name, rows)]


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

"""The tables of a reproduction, from its JSON: cells as text, for a terminal, a page and the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

NOT = "not measured"

RULES = ("rule", "what it leaves", "ours", "the paper's", "")
READINGS = ("rule", "reading", "ours", "the paper's counts imply")
BYTES = ("", "model", "m, n, k, l", "two kernels MB", "one MB", "saved %", "floor us: two", "one")
PAPERS = ("", "schedule", "cluster", "tiles", "bound us", "by", "DSM MB", "L2 MB", "printed KB", "legal", "tied")
SEARCH = ("", "the paper's space s", "candidates", "our kernels s", "kernels", "the paper's s")
OURS = ("", "kernel", "predicted us", "in order us", "measured us", "best other us", "ratio")
PIXELS = ("", "images", "rows", "kernel", "predicted us", "two kernels us", "ratio", "floor us")
PIXELS_TIMED = ("what ran", "measured us", "best other us", "times")
ABLATION = ("", "two kernels us", "C: none", "DSM", "L2", "random", "tail: add", "partials", "DSM ")
TAILS = ("reduce-add", "partials", "cluster")
"""As ``Tail`` says them."""
ARMS = ("over", "all, without L2", "random", "no DSM", "with L2")
PHASES = ("shape", "", "first product", "C back", "second product", "end")
MODEL = (
    "shape",
    "weights",
    "",
    "variants",
    "mean error",
    "worst",
    "rank correlation",
    "place of the true best",
    "lost",
)


class Shown(NamedTuple):
    """One table: the name that a page marks it with, its heading and what it says, and its cells as text."""

    key: str
    title: str
    says: str
    columns: tuple[str, ...]
    cells: list[list[str]]


def tables(data: dict[str, Any]) -> list[Shown]:
    """Every table of a reproduction's JSON."""
    rows = data["workloads"]
    return [*_of_the_paper(data, rows), *_of_ours(rows), *_of_the_model(data, rows)]


def _of_the_paper(data: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Shown]:
    """Its search space, its rules, and what they choose."""
    return [
        Shown(
            "space",
            "The search space",
            "Candidates of GPT-6.7B (M 256, N 16384, K and L 4096) after each pruning rule.",
            RULES,
            [
                [
                    s["rule"],
                    s["factors"] or s["what"],
                    _count(s["ours"]),
                    _count(s["paper"]),
                    "" if s["agrees"] else "differs",
                ]
                for s in data["rules"]
            ],
        ),
        Shown(
            "readings",
            "Readings of the rules",
            "What the words of a rule may mean: clusters of 625 and schedules of 41 that are left, and what the paper's"
            " counts imply.",
            READINGS,
            [[r["rule"], r["reading"], str(r["ours"]), f"{r['implied']:.1f}"] for r in data["readings"]],
        ),
        Shown(
            "bytes",
            "What bytes allow",
            "DRAM bytes of two kernels and of one, and the time they take at the memory's rate. No kernel saves more.",
            BYTES,
            [
                [
                    w["key"],
                    w["model"],
                    ", ".join(str(n) for n in w["sizes"].values()),
                    f"{w['unfused_bytes'] / 1e6:.1f}",
                    f"{w['fused_bytes'] / 1e6:.1f}",
                    f"{w['saved']:.0%}",
                    f"{w['unfused_floor_us']:.1f}",
                    f"{w['floor_us']:.1f}",
                ]
                for w in rows
            ],
        ),
        Shown(
            "papers",
            "The paper's choice",
            "By its rules and its cost, the slowest memory level, for m, n, k, l. Printed: Algorithm 1 as it stands,"
            " global memory of one block, without re-reads. Legal: candidates; tied: within 1 % of the best, all of"
            " which the cost cannot tell apart.",
            PAPERS,
            [_papers(w, p) for w in rows for p in w["papers_choice"]],
        ),
    ]


def _of_ours(rows: Sequence[dict[str, Any]]) -> list[Shown]:
    """Our kernels, and how long finding them takes."""
    return [
        Shown(
            "ours",
            "Ours",
            "The best of the compiler's kernels by its own prediction, weights from DRAM; in order: the best that adds"
            " in a fixed order. Measured: a generated kernel, of convolutions what torch.compile took for one image:"
            " neither need be the kernel named; weights in the L2 where they fit.",
            OURS,
            [_ours(w) for w in rows],
        ),
        Shown(
            "pixels",
            "Convolutions as row streams",
            "Pixels are rows, and taps are loads (docs/convolutions.md): the best kernel that fuses the chain, and two"
            " kernels, by the cost model; and what torch.compile took, which times its candidates and Inductor.",
            PIXELS + PIXELS_TIMED,
            [_pixels(w["key"], p) for w in rows for p in w.get("pixels", ())],
        ),
        Shown(
            "search",
            "Search time",
            "Seconds by the models, on this machine. The paper's compile and time eleven kernels besides.",
            SEARCH,
            [_search(w) for w in rows],
        ),
    ]


def _of_the_model(data: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Shown]:
    """What each part of a kernel is worth by the model, and how far that is off."""
    return [
        Shown(
            "ablation",
            "Ablation, by the model",
            "Microseconds of the best kernel of each kind, weights from DRAM. Random: the median of 101 drawn from the"
            " paper's own means.",
            ABLATION,
            [_ablation(w) for w in rows if "predicted" in w],
        ),
        Shown(
            "arms",
            "Ablation, speedups over two kernels",
            "Geometric means. The paper: all 3.29, random 2.11, no DSM 1.52, over no fusion.",
            ARMS,
            [
                [a["over"], *(f"{a[k]:.2f}" if k in a else "" for k in ("all", "random", "no DSM", "with L2"))]
                for a in data["ablation"]
            ],
        ),
        Shown(
            "model",
            "The cost model against measurement",
            "Held-out shapes had no part in the fit. Lost: how much slower the model's choice is than the true best.",
            MODEL,
            [_score(s) for s in data["model"]],
        ),
        Shown(
            "phases",
            "Phases against the kernels' clocks",
            "Microseconds from the start of the CTAs to the end of each phase, by the model and (by clocks in the"
            " kernel). The fit saw whole launches alone.",
            PHASES,
            [_phases(p) for p in data["phases"]],
        ),
        Shown(
            "claims",
            "What the paper states",
            "",
            ("figure", "the paper's", "measured", "by the model", "why they differ"),
            [
                [c["what"], *(_value(c[who], c["unit"]) for who in ("paper", "measured", "model")), c["why"]]
                for c in data["claims"]
            ],
        ),
        Shown(
            "missing",
            "What is missing",
            "What the paper has and this has not.",
            ("figure", "the paper's", "why it is missing"),
            [[m["what"], m["paper"], m["why"]] for m in data["missing"]],
        ),
    ]


def _papers(w: dict[str, Any], p: dict[str, Any]) -> list[str]:
    name = w["key"] if p["gate"] == "none" else f"{w['key']} {p['gate']}"
    end = [f"{p['legal']:,}", f"{p['tied']:,}"]
    if p["schedule"] is None:
        return [name, "none is legal", *[""] * 7, *end]
    moved = (p["bytes"]["dsm"], p["bytes"]["l2"], 1e3 * p["printed_bytes"])
    cells = [name, p["schedule"], _four(p["cluster"]), _four(p["tiles"]), f"{p['us']:.2f}", p["limit"]]
    return [*cells, *(f"{v / 1e6:.1f}" for v in moved), *end]


def _pixels(key: str, p: dict[str, Any]) -> list[str]:
    ours, apart = p["predicted_us"], p["apart_us"]
    cells = [key, str(p["images"]), f"{p['rows']:,}", p["kernel"] or "none: too wide"]
    cells += ["" if us is None else f"{us:.1f}" for us in (ours, apart)]
    ratio = "" if ours is None or apart is None else f"{apart / ours:.2f}"
    cells += [ratio, f"{p['floor_us']:.1f}"]
    times = p["timed"]
    return [*cells, *(["", NOT, NOT, ""] if times is None else [times["variant"], *_timed(times)])]


def _search(w: dict[str, Any]) -> list[str]:
    stated, best = w["papers_search_seconds"], w.get("ours")
    found = w["papers_choice"]
    cells = [w["key"], f"{sum(p['seconds'] for p in found):.2f}", f"{sum(p['legal'] for p in found):,}"]
    cells += ["", ""] if best is None else [f"{best['seconds']:.2f}", f"{best['candidates']:,}"]
    return [*cells, "" if stated is None else f"{stated:.1f}"]


def _ours(w: dict[str, Any]) -> list[str]:
    best = w.get("ours")
    cells = [w["key"], "left to two kernels", "", ""]
    if best is not None:
        cells = [w["key"], best["kernel"], f"{best['predicted_us']:.1f}", f"{best['in_order_us']:.1f}"]
    return [*cells, *([NOT, NOT, ""] if w["timed"] is None else _timed(w["timed"]))]


def _timed(times: dict[str, Any]) -> list[str]:
    """Measured: ours, the best of the others, and the gain."""
    ours, other = times["ours_us"], times["best_other_us"]
    return [f"{ours:.1f}", f"{other:.1f}", f"{other / ours:.2f}"]


def _ablation(w: dict[str, Any]) -> list[str]:
    m = w["predicted"]
    middles = [m["middles"].get(k) for k in ("none", "dsm", "l2")]
    tails = [m["tails"].get(k) for k in TAILS]
    values = [m["unfused_us"], *middles, m["random_us"], *tails]
    return [w["key"], *("" if v is None else f"{v:.1f}" for v in values)]


def _score(s: dict[str, Any]) -> list[str]:
    return [
        s["shape"],
        "from DRAM" if s["cold"] else "warm",
        "held out" if s["held_out"] else "fitted",
        str(s["count"]),
        f"{s['error']:.1%}",
        f"{s['worst']:.2f}x",
        f"{s['correlation']:.2f}",
        str(s["rank"]),
        f"{s['lost']:.1%}",
    ]


def _phases(p: dict[str, Any]) -> list[str]:
    ends = zip(p["predicted_us"], p["clocks_us"], strict=True)
    return [p["shape"], "held out" if p["held_out"] else "fitted", *(f"{ours:.1f} ({told:.1f})" for ours, told in ends)]


def _four(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _count(value: float) -> str:
    return f"{value:.3g}" if value >= 1e6 else f"{value:,.0f}"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if unit == "share" else f"{value:.2f}{unit}"


def numeric(cells: list[list[str]], index: int) -> bool:
    """Whether a column holds numbers alone, and is set to the right."""
    values = [line[index] for line in cells if line[index] not in ("", NOT)]
    return bool(values) and all(v[0].isdigit() for v in values) and all(" " not in v for v in values)

"""Write the tables of README.md and of pages of docs/ from ``benchmarks/results``: what stands between two markers.

python -m benchmarks.tables.make_tables             rewrite the pages
python -m benchmarks.tables.make_tables --check     exit code 1 if a page is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.lib.cases import COUNTED, MAIN, OTHERS, Case
from benchmarks.lib.full_models import SETS
from benchmarks.lib.marked import table, us, with_parts
from benchmarks.lib.places import DOCS, RESULTS, ROOT
from benchmarks.tables import decoder_tables, real_tables, short_table
from benchmarks.tables.launch_tables import launches

PAGES = {
    ROOT / "README.md": ("short", "truth"),
    DOCS / "results.md": (
        "machine",
        "drawn",
        "fresh",
        "seen",
        "fresh-and-seen",
        "steps",
        "drawn-steps",
        "published",
        "main",
        "whole",
        "decoders",
        "training",
        "applications",
        "host",
        "others",
        "dram",
        "first-call",
    ),
    DOCS / "queues.md": ("queues",),
    DOCS / "training-results.md": ("training", "launches"),
    DOCS / "when-dataflow-helps.md": ("spatial-wins",),
}
"""Each page and the marked parts that it must have, once."""
NONE = "No results yet: `python -m benchmarks.run.run_all` on an H200 makes them."
WHOLE = {
    "nerf_65536": "NeRF, 65,536 points",
    "nerf_16384": "NeRF, 16,384 points",
    "nerf_262144": "NeRF, 262,144 points",
    "mgn": "MeshGraphNets, 15 steps, 8 meshes",
    "mgn_200000": "MeshGraphNets, 15 steps, 198,000 edges",
    "graphcast_small": "GraphCast, 1 degree, 4 steps",
    "graphcast_small_16": "GraphCast, 1 degree, 16 steps",
    "dlrm_2048": "DLRM, batch 2,048",
    "dlrm_32768": "DLRM, batch 32,768",
    "llama_layer": "Llama 3 8B, one layer, 1,024 tokens",
    "llama_decode_1": "the same, one token behind 1,023, batch 1",
    "llama_decode_16": "the same, batch 16",
}
TRAINING = {
    "nerf_65536": "NeRF, 65,536 points",
    "nerf_262144": "NeRF, 262,144 points",
    "mgn": "MeshGraphNets, 15 steps, 8 meshes",
    "mgn_200000": "MeshGraphNets, 15 steps, 198,000 edges",
    "graphcast_small_4": "GraphCast, 1 degree, 4 steps",
    "graphcast_small_16": "GraphCast, 1 degree, 16 steps",
    "dlrm_2048": "DLRM, batch 2,048",
    "dlrm_32768": "DLRM, batch 32,768",
    "llama_layer": "Llama 3 8B, one layer, 1,024 tokens",
}
KITSUNE = ("1.5", "1.1 to 2.2, a range")
"""What its simulator gave, end to end (Kitsune, section 6, figures 11 and 14)."""
ARMS = ("eager", "inductor", "inductor_max_autotune", "tilestream")


def load(case: Case) -> dict[str, Any] | None:
    return json.loads(case.path.read_text()) if case.path.exists() else None


def strategies(result: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(r["chosen"]["strategy"] for r in result["plan"]["regions"] if r["chosen"]))


def times(cases: Sequence[Case]) -> str:
    """Microseconds of every arm, the gain over the best of the others, and the goal."""
    goals = any(case.goal_us for case in cases)
    headings = ["case (bf16)", "rows", "eager", "Inductor", "max-autotune", "tilestream", "gain"]
    headings += (["goal"] if goals else []) + ["strategy", "error / eager's"]
    rows = []
    for case in cases:
        result = load(case)
        if result is None:
            continue
        arm = {name: result["arms"].get(name, {}).get("us") for name in ARMS}
        ours = arm["tilestream"]
        gain = "-" if result["speedup"] is None else f"{result['speedup']:.2f}"
        ratio = result["error"] / result["eager_error"] if result["eager_error"] else float("nan")
        rows.append(
            [
                case.title,
                f"{result['rows']:,}",
                *(us(arm[name]) for name in ARMS[:3]),
                f"**{us(ours)}**",
                gain,
                *([us(case.goal_us)] if goals else []),
                strategies(result),
                f"{ratio:.2f}",
            ]
        )
    return table(headings, rows) if rows else NONE


def whole_models() -> str:
    """Whole applications: microseconds a call, and seconds of the first: empty caches / in a second process."""
    rows = []
    for name, title in WHOLE.items():
        path = RESULTS / "whole" / f"{name}.json"
        if not path.exists():
            continue
        made = json.loads(path.read_text())
        arm = made["arms"]
        times = [us(arm.get(a, {}).get("us")) for a in ARMS[:3]]
        first = [first_calls(name, arm, a) for a in ("inductor", "tilestream")]
        times[1] += of_runs(made)
        rows.append([title, *times, f"**{us(arm['tilestream']['us'])}**", str(short_table.gain(made)), *first])
    headings = ["whole model (bf16)", "eager", "Inductor", "max-autotune", "tilestream", "gain"]
    return table([*headings, "first call, Inductor (s)", "first call, tilestream (s)"], rows) if rows else NONE


def published() -> str:
    """Whole models of other libraries that were timed of an earlier version alone."""
    rows = []
    for model, row in short_table.published().items():
        first, floor, one = row["first_call_s"], row["over_floor"], row["us"]
        both = f"{first['inductor']} / {first['tilestream']}" if first else "-"
        times = [us(one[arm]) for arm in ("eager", "inductor")]
        gain = f"{short_table.over_best(one):.2f}"
        rows.append([model, *times, f"**{us(one['tilestream'])}**", gain, f"{floor:g}" if floor else "-", both])
    headings = ["model (bf16)", "eager", "Inductor", "tilestream", "gain", "over the floor"]
    return table([*headings, "first call (s): Inductor / tilestream"], rows)


def training() -> str:
    """Training steps: microseconds with and without the optimizer, and peak memory beyond what a step finds there."""
    found, rows = short_table.training_rows(), []
    for name, title in TRAINING.items():
        if name not in found:
            continue
        arm = found[name]["arms"]
        others = [arm.get(a, {}).get("us") for a in ("eager", "inductor")]
        alone = [us(arm.get(a, {}).get("gradients_us")) for a in ("inductor", "tilestream")]
        peaks = [f"{arm[a]['peak_bytes'] / 2**20:,.0f}" for a in ("inductor", "tilestream")]
        gain = str(short_table.gain(found[name]))
        cells = [*map(us, others), f"**{us(arm['tilestream']['us'])}**", gain, " / ".join(alone)]
        cells[1] += of_runs(found[name])
        rows.append([title, *cells, " / ".join(peaks)])
    headings = ["training step (bf16)", "eager", "Inductor", "tilestream", "gain"]
    without = "without the optimizer: Inductor / tilestream"
    return table([*headings, without, "peak MiB: Inductor / tilestream"], rows) if rows else NONE


def of_runs(made: dict[str, Any]) -> str:
    """Inductor's fastest and slowest run, where its times differ by more than the rounds of a run."""
    runs = made.get("inductor_us_of_runs")
    return f" ({us(min(runs))} to {us(max(runs))} in {len(runs)} runs)" if runs else ""


def applications() -> str:
    """Gains of the five applications, their geometric means, and Kitsune's; in brackets against the fastest of
    Inductor's runs, where these differ."""
    rows = []
    gains: tuple[list[short_table.Gain], ...] = ([], [])
    for title, found in short_table.applications().items():
        for all_, gain in zip(gains, found, strict=True):
            all_ += [gain] if gain else []
        rows.append([title, *("-" if gain is None else str(gain) for gain in found)])
    means = [str(short_table.mean(g)) if g else "-" for g in gains]
    rows += [["geometric mean", *means], ["Kitsune, simulated", *KITSUNE]]
    return table(["application", "inference", "training step"], rows)


def first_calls(name: str, arms: dict[str, Any], arm: str) -> str:
    """Seconds of an arm's first call, in processes of its own where those were timed."""
    path = RESULTS / "whole" / f"first_{name}.json"
    timed = json.loads(path.read_text())["arms"].get(arm) if path.exists() else None
    if timed is None:
        return f"{arms[arm]['first_call_s']:.1f}" if "first_call_s" in arms[arm] else "-"
    again = f" / {timed['second_process_s']:.1f}" if "second_process_s" in timed else ""
    return f"{timed['cold_s']:.1f}{again}"


def host() -> str:
    """A plain loop without CUDA graphs: wall microseconds a call, and of that a region's call."""
    rows = []
    for path in sorted((RESULTS / "whole").glob("host_*.json")):
        made = json.loads(path.read_text())
        arms = ("eager", "inductor", "inductor, reduce-overhead", "tilestream", "tilestream, reduce-overhead")
        cells = [us(made["us"].get(arm)) for arm in arms]
        rows.append([made["model"], f"{made['rows']:,}", *cells, us(sum(made["regions"]))])
    headings = ["model", "rows", "eager", "Inductor", "its reduce-overhead", "tilestream", "its reduce-overhead"]
    return table([*headings, "region's call"], rows) if rows else NONE


def dram(cases: Sequence[Case]) -> str:
    """DRAM bytes by ncu beside the IR's own count."""
    rows = []
    for case in cases:
        counted = (load(case) or {}).get("dram_bytes", {})
        ir, ours, other = counted.get("ir"), counted.get("tilestream"), counted.get("inductor")
        if not isinstance(ours, dict) or ir is None:
            continue
        inductor = f"{(other['read'] + other['write']) / 1e6:,.0f}" if isinstance(other, dict) else "-"
        cells = (ours["read"], ir["read"], ours["write"], ir["write"])
        rows.append([case.title, *(f"{v / 1e6:,.1f}" for v in cells), inductor])
    headings = ["case", "MB read", "the IR's count", "MB written", "the IR's count", "Inductor, MB in all"]
    return table(headings, rows) if rows else NONE


def first_call(cases: Sequence[Case]) -> str:
    """Seconds of the first call, with empty and with full caches, beside a capture that compiles nothing."""
    says = {"cold": "empty", "warm": "full: a second process", "capture": "torch's capture alone (`aot_eager`)"}
    rows = []
    for case in cases:
        timed = (load(case) or {}).get("first_call")
        if timed is None:
            continue
        for name, what in says.items():
            parts = timed[name]
            ours = sum(parts.get(part, 0.0) for part in ("regions", "planning", "kernels", "timing", "inductor"))
            seconds = (timed[f"{name}_s"], parts["imports"], timed[f"{name}_s"] - parts["imports"], ours)
            rows.append([case.title, what, *(f"{s:.2f}" for s in seconds)])
    heads = ["model", "caches", "seconds in all", "`torch.compile` itself", "call of the model", "of that tilestream"]
    return table(heads, rows) if rows else NONE


def queues() -> str:
    """Ring queues as ``tilestream bench queues`` measured them."""
    path = RESULTS / "queues.json"
    if not path.exists():
        return NONE
    found = json.loads(path.read_text())["queues"]
    headings = [h.replace("_", " ") for h in found[0]]
    return table(headings, [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in found])


def launch_table() -> str:
    """Launches of the five applications, predicted and measured, and how far predictions are off on average."""
    rows = launches()
    headings = ["model", "launch", "runs as", "equal ones", "predicted us", "measured us", "off by"]
    if not rows:
        return NONE
    off = [abs(float(row[-1].rstrip("%"))) for row in rows]
    mean = f"{sum(off) / len(off):.0f}%"
    return table(headings, [*rows, ["mean of all", f"{len(rows)} different ones", "", "", "", "", mean]])


def machine() -> str:
    """What the results were made with; several lines where they were not all made with the same."""
    seen = []
    for case in (*MAIN, *OTHERS):
        e = (load(case) or {}).get("environment")
        if e:
            seen.append(f"{e['gpu']}, driver {e['driver']}, CUDA {e['cuda']}, torch {e['torch']}, Triton {e['triton']}")
    return "\n".join(f"- {line}" for line in dict.fromkeys(seen)) or NONE


TITLES = {"eager": "eager", "inductor": "Inductor", "tilestream": "ours"}


def truth() -> str:
    """Mean errors of predictions: kernels by kind, and whole models; of the fresh set, and of the validation set."""
    paths = [RESULTS / name for name in ("fresh_truth.json", "truth.json", "whole_truth.json")]
    if not all(path.exists() for path in paths):
        return NONE
    fresh, kernels, whole = (json.loads(path.read_text()) for path in paths)
    drawn = _errors((*fresh["points"], *fresh["models"]))
    points = [p for p in kernels["points"] if p["validation"]]
    chosen = _errors((*points, *(p for p in whole["rows"] if p["fit"] != "yes")))
    rows = [[what, *_told(errors), *_told(chosen[what])] for what, errors in drawn.items()]
    heads = ("number", "mean absolute error", "mean error", "worst")
    return table(["predicted for an H200", *(f"{name}: {h}" for name in ("fresh", "validation") for h in heads)], rows)


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Of each kind of kernel, of each arm of whole models, and of all of these."""
    found: dict[str, list[float]] = {}
    for p in rows:
        kind = p["group"].removesuffix(" and neighbours") + " (kernels)" if "group" in p else ""
        for what in (kind,) if kind else (f"whole models, {TITLES[p['arm']]}", "whole models, all"):
            found.setdefault(what, []).append(p["predicted_us"] / p["measured_us"] - 1)
    return {what: found[what] for what in sorted(found, key=lambda what: what == "whole models, all")}


def _told(errors: Sequence[float]) -> list[str]:
    mean, bias = f"{fmean(map(abs, errors)):.0%}", f"{round(100 * fmean(errors)):+d}%"
    return [str(len(errors)), mean, bias, f"{max(errors, key=abs):+.0%}"]


def spatial_wins() -> str:
    """Microseconds of the best candidate of each kind, measured / predicted, and what the planner takes of them."""
    path = RESULTS / "spatial_wins.json"
    if not path.exists():
        return "No results yet: `python -m benchmarks.run.spatial_wins` on an H200 makes them."
    made = json.loads(path.read_text())
    kinds = ("fallback", "vertical", "spatial by layers", "spatial by columns")
    cases: dict[tuple[str, str, int], dict[str, list[dict[str, Any]]]] = {}
    for row in made["rows"]:
        cases.setdefault((row["why"], row["case"], row["rows"]), {}).setdefault(row["kind"], []).append(row)
    rows = []
    for (_, case, count), found in sorted(cases.items(), key=lambda item: item[0]):
        timed = {kind: [r for r in found.get(kind, ()) if r["measured_us"]] for kind in kinds}
        best = {kind: min(rs, key=lambda r: r["measured_us"], default=None) for kind, rs in timed.items()}
        cells = [f"{us(r['measured_us'])} / {us(r['predicted_us'])}" if r else "-" for r in best.values()]
        spatial, other = ([r["measured_us"] for k in group for r in timed[k]] for group in (kinds[2:], kinds[:2]))
        gain = f"{min(other) / min(spatial):.2f}" if spatial and other else "-"
        chosen = made["chosen"][f"{case}, {count:,} rows"].split(" ")[0]
        rows.append([case, f"{count:,}", *cells, gain, {"fallback": "Inductor"}.get(chosen, chosen)])
    headings = ["model (bf16)", "rows", "Inductor", "vertical", "by layers", "by columns", "gain of spatial", "chosen"]
    return table(headings, rows)


def tables() -> dict[str, str]:
    """Marker to what stands under it."""
    return {
        "short": table(*short_table.rows()),
        "truth": truth(),
        **{name: real_tables.lines(models) for name, models in SETS.items()},
        "fresh-and-seen": real_tables.all_of_them(),
        "published": published(),
        "main": times(MAIN),
        "whole": whole_models(),
        "training": training(),
        "applications": applications(),
        "decoders": table(*decoder_tables.compiled("layers")),
        "host": host(),
        "others": times(OTHERS),
        "dram": dram(COUNTED),
        "first-call": first_call(MAIN),
        "queues": queues(),
        "launches": launch_table(),
        "spatial-wins": spatial_wins(),
        "machine": machine(),
    }


def filled(text: str, parts: Sequence[str]) -> str:
    """``text`` with the parts of these names rewritten.

    Raises:
        ValueError: a part's marker is not there, or twice.
    """
    made = tables()
    return with_parts(text, {name: made[name] for name in parts}, "tables/make_tables.py", "the page")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    stale = []
    for page, parts in PAGES.items():
        text = page.read_text(encoding="utf-8")
        made = filled(text, parts)
        if made != text:
            stale.append(page.name)
            if not given.check:
                page.write_text(made, encoding="utf-8")
    if given.check and stale:
        print(f"{', '.join(stale)}: not what benchmarks/results says; run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

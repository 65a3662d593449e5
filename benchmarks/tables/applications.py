"""Write the tables of docs/applications.md: Kitsune's five applications on an H200, from ``benchmarks/results``.

python -m benchmarks.tables.applications            rewrite the page
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from benchmarks.lib.marked import table, us, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.tables.make_tables import KITSUNE, TRAINING, WHOLE
from benchmarks.tables.short_table import APPLICATIONS, Gain, mean, training_rows

PAGE = DOCS / "applications.md"
NONE = "No results yet: `python benchmarks/{}` makes them, on a GPU."
OTHERS = ("eager", "inductor", "inductor_max_autotune")
GOALS_US: dict[str, Mapping[str, float]] = {
    "inference": {
        "nerf_65536": 125,
        "nerf_262144": 480,
        "mgn": 1700,
        "graphcast_small": 5600,
        "dlrm_2048": 85,
        "dlrm_32768": 600,
        "llama_layer": 680,
    },
    "training": {"nerf_65536": 830, "mgn": 8000, "graphcast_small_4": 19000, "dlrm_2048": 850, "dlrm_32768": 3900},
}
"""What was set out to be reached on an H200; DLRM's steps without their optimizer."""
GOALS: dict[str, Mapping[str, float]] = {
    "inference": {"mgn_200000": 2.5, "graphcast_small_16": 1.5, "llama_decode_1": 1.0, "llama_decode_16": 1.0},
    "training": {"nerf_262144": 1.8, "mgn_200000": 1.7, "llama_layer": 1.0},
}
"""The same where a gain was set."""
MEANT = (
    ("inference, H200", 0, "us", 2.2, ""),
    ("Kitsune simulated, A100", 0, "", None, KITSUNE[0]),
    ("training step, H200", 1, "us", 1.6, ""),
    ("the same without its optimizer", 1, "gradients_us", 1.6, ""),
    ("Kitsune simulated, A100 ", 1, "", None, KITSUNE[1]),
)
"""Columns of gains: a head; whether of steps; which time is ours, none where it is the simulator's; the mean that was
to be reached; the paper's own."""
PAPER = {
    "NeRF": ("NERF inf", "NERF tr"),
    "MeshGraphNets": ("MGN inf", "MGN tr"),
    "GraphCast": ("GRC inf", "GRC tr"),
    "DLRM": ("DLRM inf", "DLRM tr"),
    "Llama layer": ("LL-CTX", "LLAMA tr"),
}
"""Each application's rows of the paper's Table 2."""
CASES = {
    "nerf_65536": ("NeRF, 65,536 points", "NERF inf"),
    "dlrm_2048": ("DLRM, batch 2,048", "DLRM inf"),
    "mgn_2_steps": ("MeshGraphNets, 2 of 15 steps, 8 meshes", "MGN inf"),
    "block": ("norm, 768-3072-768, GELU, residual; 16,384 rows", ""),
    "G4": ("G4: 768-3072-768, 128 rows", ""),
    "S2": ("S2: 2048-5632-2048, gated, 128 rows", ""),
}
"""Cases of ``traffic.py``, each with its row of Table 2."""
ARM = {"eager": "eager", "inductor": "Inductor", "tilestream": "tilestream"}
TRAINED = {"nerf": "NeRF, 65,536 points", "mgn": "MeshGraphNets", "dlrm": "DLRM, batch 2,048"}


def read(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def best(made: Mapping[str, Any], key: str = "us") -> float:
    """Microseconds of the best of the others, of a result with ``arms``."""
    arms = made["arms"]
    return min(arms[arm][key] for arm in OTHERS if arm in arms and key in arms[arm])


def gain(made: Mapping[str, Any], key: str = "us") -> Gain:
    """The best of the others over ours; whole calls and steps also against the fastest of Inductor's runs."""
    other, ours = best(made, key), made["arms"]["tilestream"][key]
    runs = made.get("inductor_us_of_runs", ()) if key == "us" else ()
    return Gain(other / ours, min(other, *runs) / ours if runs else other / ours)


def inference(name: str) -> dict[str, Any] | None:
    return read(f"whole/{name}.json")


def sizes() -> str:
    """Every size that was timed: the best of the others, ours, the gain and what was to be reached."""
    lines = []
    for kind, titles, made_of in (
        ("inference", WHOLE, inference),
        ("training", TRAINING, training_rows().get),
    ):
        for name, title in titles.items():
            if (made := made_of(name)) is None:
                continue
            key = "gradients_us" if kind == "training" and name.startswith("dlrm") else "us"
            if key not in made["arms"]["tilestream"]:
                continue
            ours, gained = made["arms"]["tilestream"][key], gain(made, key)
            what = kind + (", without the optimizer" if key != "us" else "")
            met = against_goal(kind, name, ours, gained.least)
            lines.append([title, what, us(best(made, key)), f"**{us(ours)}**", str(gained), met])
    return table(["application (bf16, us)", "what", "best of the others", "tilestream", "gain", "goal"], lines)


def against_goal(kind: str, name: str, ours_us: float, gained: float) -> str:
    """What was to be reached, and whether it was, to the two digits that are shown; a dash where nothing was set."""
    told = {True: "reached", False: "missed"}
    if (goal := GOALS_US[kind].get(name)) is not None:
        return f"{goal:,.0f}, {told[ours_us <= goal]}"
    if (least := GOALS[kind].get(name)) is not None:
        return f"{least} times, {told[round(gained, 2) >= least]}"
    return "-"


def means() -> str:
    """One size of each application: gains, their geometric means, the goals, and what simulators say of Kitsune."""
    steps = training_rows()
    simulated = {row["label"]: row["speedup"] for row in (read("kitsune.json") or {"rows": []})["rows"]}
    columns: list[dict[str, Gain]] = [{} for _ in MEANT]
    for title, (name, step) in APPLICATIONS.items():
        own, published = (inference(name), steps.get(step)), PAPER[title]
        for column, (_, kind, key, _, _) in zip(columns, MEANT, strict=True):
            if not key:
                column[title] = Gain(*[simulated[published[kind]]] * 2)
            elif (made := own[kind]) is not None:
                column[title] = gain(made, key)
    ours = [bool(key) for _, _, key, _, _ in MEANT]
    rows = []
    for title in APPLICATIONS:
        found = [column.get(title) for column in columns]
        rows.append([title, *(shown(x, own) for x, own in zip(found, ours, strict=True))])
    means = [shown(mean([*column.values()]), own) for column, own in zip(columns, ours, strict=True)]
    rows += [["geometric mean", *means]]
    rows += [["the paper's simulator", *(paper for _, _, _, _, paper in MEANT)]]
    rows += [["goal", *(str(goal or "") for _, _, _, goal, _ in MEANT)]]
    return table(["application", *(head for head, *_ in MEANT)], rows)


def shown(gained: Gain | None, own: bool) -> str:
    """A gain with two digits, ours in bold; a dash where there is none."""
    return "-" if gained is None else f"**{gained}**" if own else str(gained)


def megabytes(state: Mapping[str, float] | None) -> str:
    return "-" if state is None else f"{state['read'] / 1e6:,.1f} + {state['written'] / 1e6:,.1f}"


def traffic() -> str:
    """Megabytes of one call by the counters, cold and warm, beside the plan's count."""
    found = read("traffic.json")
    if found is None:
        return NONE.format("traffic.py")
    lines = []
    for case, (title, _) in CASES.items():
        one = found["cases"].get(case, {})
        for arm, called in ARM.items():
            states, planned = one.get("counted", {}).get(arm, {}), one.get("planned", {})
            plan, levels = planned.get(arm), planned.get("levels") if arm == "tilestream" else None
            if not states and plan is None:
                continue
            cold = states.get("cold")
            cells = ["-" if plan is None else f"{plan / 1e6:,.1f}", megabytes(cold), megabytes(states.get("warm"))]
            cells.append("-" if levels is None else f"{levels['l2'] / 1e6:,.1f}")
            cells.append("-" if cold is None else f"{cold['l2'] / 1e6:,.1f}")
            lines.append([title, called, *cells])
    heads = ["MB of one call", "arm", "DRAM by the plan", "DRAM, cold: read + written", "DRAM, warm"]
    return table([*heads, "L2 by the plan", "L2, cold"], lines)


def saved() -> str:
    """Parts of eager's traffic that are saved, beside the paper's."""
    found, study = read("traffic.json"), read("kitsune.json")
    if found is None or study is None:
        return NONE.format("traffic.py")
    paper = {row["label"]: row for row in study["rows"]}
    lines = []
    for case, (title, label) in CASES.items():
        counted = found["cases"].get(case, {}).get("counted", {})
        if not label or "eager" not in counted:
            continue
        own, base = (sum(counted[arm]["cold"][k] for k in ("read", "written")) for arm in ("tilestream", "eager"))
        published = [f"{paper[label]['paper'][k]:.2f}" for k in ("traffic_vertical", "traffic_kitsune")]
        lines.append([title, f"**{100 * (1 - own / base):.1f}**", *published])
    if not lines:
        return NONE.format("traffic.py")
    heads = ["DRAM traffic saved (%)", "tilestream, H200, by counters, cold", "paper: vertical fusion"]
    return table([*heads, "paper: Kitsune"], lines)


def losses() -> str:
    """Where seeds end, arm by arm, and the difference of arms that began alike."""
    found = read("losses.json")
    if found is None:
        return NONE.format("losses.py")
    by_case: dict[str, dict[str, Any]] = {}
    for one in found["trained"]:
        by_case.setdefault(one["case"], {})[one["arm"]] = one
    lines = []
    for case, arms in by_case.items():
        eager = arms["eager"]
        start = fmean(run["start"] for run in eager["runs"])
        for arm, one in arms.items():
            apart = [a["end"] - b["end"] for a, b in zip(one["runs"], eager["runs"], strict=False)]
            error = math.sqrt((one["spread"] ** 2 + eager["spread"] ** 2) / len(apart))
            steps = min(run["steps"] for run in one["runs"])
            cells = [f"{start:.4f}", f"{one['mean']:.5f}", f"{one['spread']:.5f}"]
            if arm == "eager":
                cells += ["", "", ""]
            else:
                within = "within noise" if abs(one["mean"] - eager["mean"]) <= 2 * error else "apart"
                cells += [f"{fmean(apart):+.5f}", f"{stdev(apart):.5f}" if len(apart) > 1 else "-", within]
            lines.append([TRAINED[case], ARM[arm], str(len(one["runs"])), f"{steps:,}", *cells])
    heads = ["trained", "arm", "seeds", "steps", "loss at first", "at the end", "spread over seeds"]
    return table([*heads, "beside eager, seed by seed", "its spread", ""], lines)


def gradient_errors() -> str:
    """Errors of gradients against float64, arm by arm: of all as one vector, and of the parameter with the largest."""
    found = read("gradient_errors.json")
    if found is None:
        return NONE.format("gradient_errors.py")
    lines = []
    for row in found["rows"]:
        arms = {arm: row["arms"][arm] for arm in ("eager", "tilestream")}
        eager, ours = arms.values()
        errors = [f"{one[key]:.1e}" for key in ("error", "worst") for one in arms.values()]
        same = " / ".join("yes" if one["same_bits"] else "no" for one in arms.values())
        ratio = f"{ours['error'] / eager['error']:.2f}"
        lines.append([TRAINING[row["case"]], *errors[:2], ratio, *errors[2:], str(row["launches"]), same])
    heads = ["step (bf16)", "all gradients: eager", "tilestream", "times", "worst parameter: eager", "tilestream "]
    return table([*heads, "launches of ours", "same bits twice: eager / tilestream"], lines)


def two_gpus() -> str:
    """Steps on one GPU and on two by every way to exchange gradients, as loops and as CUDA graphs, arm by arm."""
    found = read("two_gpus.json")
    if found is None:
        return NONE.format("two_gpus.py")
    lines = []
    for case, one in found.items():
        sized = ", ".join(f"{k} {v:,}" for k, v in one["sizes"].items())
        step = f"{TRAINED[case].split(',')[0]} ({sized} a GPU)"
        for arm, row in one["arms"].items():
            for way, made in row.get("ways", {}).items():
                loops = [us(row["alone_us"]), us(made.get("us")), times(made.get("scaling"))]
                graphs = [us(row.get("graph_us")), us(made.get("graph_us")), times(made.get("graph_scaling"))]
                error = max(made.get(key, 0.0) for key in ("error", "graph_error"))
                lines.append([step, ARM[arm], f"`{way}`", *loops, *graphs, f"{error:.1e}"])
    loops = ["loop: one GPU", "two", "throughput, times"]
    graphs = ["CUDA graph: one GPU", "two ", "throughput, times "]
    return table(["a step, us", "arm", "exchange", *loops, *graphs, "error of gradients"], lines)


def times(ratio: float | None) -> str:
    """A dash where there is none."""
    return "-" if ratio is None else f"{ratio:.2f}"


def filled(text: str) -> str:
    """``text`` of the page with its marked parts rewritten.

    Raises:
        ValueError: a marker is missing.
    """
    parts: dict[str, str] = {
        "means": means(),
        "sizes": sizes(),
        "traffic": traffic(),
        "saved": saved(),
        "losses": losses(),
        "gradient-errors": gradient_errors(),
        "two-gpus": two_gpus(),
    }
    return with_parts(text, parts, "tables/applications.py", PAGE.name)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Write the tables of docs/gnn.md from ``benchmarks/results``.

python -m benchmarks.run.gnn
python -m benchmarks.run.pyg_layers
python -m benchmarks.tables.gnn_tables             rewrite the page
python -m benchmarks.tables.gnn_tables --check     exit code 1 if the page is not what the results say
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.gnn_models import MODELS
from benchmarks.lib.marked import table, us, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.run.pyg_layers import WAYS, kinds
from benchmarks.tables import prose

PAGE = DOCS / "gnn.md"
NONE = "Not measured yet."
WHAT = {
    "gin": "GIN, 5 layers of 64",
    "sage": "GraphSAGE, 3 of 128",
    "gcn": "GCN, 3 of 128 (plain loop)",
    "gcn_whole": "GCN, 3 of 128, in one graph (plain loop)",
    "gat": "GAT, 3 layers, 4 heads of 64",
    "edge_conv": "EdgeConv (DGCNN) 16-64-64-128",
    "pna": "PNA, ZINC's molecules, batch 128",
    "schnet": "SchNet, 256 molecules, fp32",
    "dimenet": "DimeNet++, 256 molecules, fp32",
    "transformer": "TransformerConv (UniMP), ogbn-arxiv's size",
    "gatv2": "GATv2, 3 layers, 4 heads of 32",
    "cgconv": "CGConv, 3 of 64, edges of 41",
    "gine": "GINE, 5 of 96, edges of 96",
    "two_sums": "own code: softmax and maximum, 3 of 72",
    "bigbird": "BigBird, GPT-3 small's sizes, batch 16",
    "window": "sliding window of 512, 2 x 16 x 8,192",
    "packed": "packed sequences, 16 heads x 16,384",
    "experts": "experts: 64 of 1024-512-1024, 2 of 4,096 tokens",
}
KINDS = {"uniform": "uniform", "power": "power law", "nearest": "16 neighbours", "molecules": "molecules"}
ARMS = ("eager", "csr", "inductor", "max_autotune", "tilestream")


def of(row: dict[str, Any]) -> tuple[str, str, str]:
    """A row's model, graph and mode."""
    name, *others = row["case"].split("/")
    graph = next((o for o in others if o in KINDS), "")
    return name, graph, next((o for o in others if o not in KINDS), "")


def lines(rows: Sequence[dict[str, Any]], mode: str) -> str:
    """Microseconds of every arm; those kept aside first. There is no gain where Inductor compiled nothing."""
    found, missing = [], list[str]()
    for row in rows:
        (name, graph, own), times = of(row), row.get("us", {})
        if own != mode and not (mode == "" and own == "kept"):
            continue
        if "tilestream" not in times:
            missing.append(f"{WHAT[name]}{f' ({KINDS[graph]})' if graph else ''}")
            continue
        fresh = name in MODELS and MODELS[name].fresh
        text = WHAT[name] + (", kept aside" if fresh else "") + (", the list kept" if own == "kept" else "")
        off = row.get("error_ratio")
        others = [us(times.get(arm)) for arm in ARMS]
        gain = f"{row['speedup']:.2f}" if _gains(row) else "-"
        ratio = "-" if off is None else f"{off:.2f}"
        found.append([text, KINDS.get(graph, ""), *others, gain, us(row.get("floor_us")), ratio])
    if not found:
        return NONE
    gains = [row["speedup"] for row in rows if of(row)[2] == mode and _gains(row)]
    heads = ["", "graph", "eager", "CSR", "Inductor", "max-autotune", "tilestream", "gain", "floor", "error"]
    mean = f"Geometric mean of the gains: {statistics.geometric_mean(gains):.2f}, of {len(gains)}." if gains else ""
    left = f"\n\nNot captured as a CUDA graph in that run: {', '.join(missing)}." if missing else ""
    return f"{table(heads, found, 2)}\n\n{mean}{left}"


def _gains(row: dict[str, Any]) -> bool:
    return "speedup" in row and "inductor" in row["us"]


def layers(made: dict[str, Any] | None) -> str:
    if made is None:
        return NONE
    names = ("right", "wrong", "crashed", "eager_crashed", "with a region")
    heads = ["", "right", "wrong", "crashed", "eager crashes", "with a region of ours"]
    found = kinds(made["rows"])
    text = table(heads, ([way, *(str(found[way][n]) for n in names)] for way in WAYS))
    where = "On an H200" if made["device"] == "cuda" else "On a CPU, where regions run on the reference machine"
    where += "" if made["inductor"] else ", what Inductor would compile as it is, and sums always in sorted order"
    left = [row["layer"] for row in made["rows"] if any("eager_crashed" in row.get(way, {}) for way in WAYS)]
    return f"{where}:\n\n{text}" + (f"\n\nEager itself crashes: {', '.join(left)}." if left else "")


def parts() -> dict[str, str]:
    """Each marked part of the page."""
    measured, tried = (_load(name) for name in ("gnn", "pyg_layers"))
    rows = [] if measured is None else measured["rows"]
    made = {"inference": lines(rows, ""), "training": lines(rows, "training"), "layers": layers(tried)}
    return {name: prose.wrapped(f"{part}\n").strip("\n") for name, part in made.items()}


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def filled(text: str) -> str:
    return with_parts(text, parts(), "tables/gnn_tables.py", PAGE.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    if given.check:
        return int(filled(text) != text)
    PAGE.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

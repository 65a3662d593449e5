"""Why the paper's headline on utilisation does not come out: the share of time with SM and DRAM both low, otherwise.

The paper's falls from 26 to 15 % (inference) and from 44 to 18 % (training) from bulk to Kitsune; ours does not fall.
Each cause that may be behind it is one change of what is counted, or of what is run, and is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilestream.simulator.library import products
from tilestream.studies.kitsune import design
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.evaluate import evaluate
from tilestream.studies.kitsune.graphs import table2_graph
from tilestream.studies.kitsune.outcome import Outcome
from tilestream.studies.kitsune.summary import BULK, KITSUNE, variant_of

COUNTED = "as counted here"
TENSOR = "the tensor pipes alone are the SM"
SLICES = "by moments of time, not by launches"
ALIGNED = "no cost of alignment"
QUARTER = "a quarter of the batch"
BOTH = "a quarter of the batch, and the tensor pipes alone"
CAUSES = (COUNTED, TENSOR, SLICES, ALIGNED, QUARTER, BOTH)

QUARTERS: Mapping[str, Mapping[str, int]] = {
    "dlrm": {"batch": 512},
    "graphcast": {"nodes": 2562, "edges": 20460},
    "mgn": {"nodes": 475, "edges": 2750},
    "nerf": {"rows": 2560},
    "llama_prefill": {"batch": 2},
    "llama_decode": {},
}
"""Sizes of a quarter of the rows, by application; decoding has one row."""
TRAINED: Mapping[str, Mapping[str, int]] = {"llama_prefill": {"batch": 1}}
"""Where a row of training has another batch."""


def causes(app: str, mode: str, graph: OperatorGraph, device: str) -> dict[str, tuple[float, float]]:
    """By cause, the share of bulk's and of Kitsune's time in which SM and DRAM are both low, 0 to 1."""
    sizes = (TRAINED if mode == "training" else {}).get(app) or QUARTERS[app]
    base = _run(graph, device)
    with products.families(*products.aligned()):
        aligned = _run(graph, device)
    smaller = _run(table2_graph(app, mode, **sizes), device) if sizes else base
    return {
        COUNTED: _shares(base),
        TENSOR: _shares(base, pipes=("tensor",)),
        SLICES: (base[0].both_low_at_once(), base[1].both_low_at_once()),
        ALIGNED: _shares(aligned),
        QUARTER: _shares(smaller),
        BOTH: _shares(smaller, pipes=("tensor",)),
    }


def _shares(runs: tuple[Outcome, Outcome], **pipes: Any) -> tuple[float, float]:
    bulk, kitsune = (run.quadrants(**pipes).both_low for run in runs)
    return bulk, kitsune


def _run(graph: OperatorGraph, device: str) -> tuple[Outcome, Outcome]:
    phases = {op.name: str(op.phase) for op in graph.operators}
    made = []
    for execution in (BULK, KITSUNE):
        machine = variant_of(device, "", execution == KITSUNE)
        workload = design(graph, machine, execution).workload
        made.append(evaluate(workload, machine, app=graph.name, mode=graph.mode, execution=execution, phases=phases))
    return made[0], made[1]

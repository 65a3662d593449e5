"""What the paper leaves open and we had to choose: rows of Table 2 as they would be by the other choice.

The batches of Llama and NeRF, and how much an earlier call has left in decoding's cache, were chosen by the traffic
that Table 2 states (docs/apps.md). One exclusion rule is not in the paper (``compiler.selection.COMPLETE``).
Vertical fusion of a training graph writes nothing for the backward pass in Table 2, and does in what is simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tilestream.studies.kitsune import design, paper, table2
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.evaluate import evaluate
from tilestream.studies.kitsune.graphs import table2_graph
from tilestream.studies.kitsune.summary import BULK, KITSUNE, VERTICAL, Other, variant_of

LLAMA = (
    ("8 sequences of 256 tokens", {"batch": 8, "tokens": 256}),
    ("4 sequences of 1,024 tokens", {"batch": 4, "tokens": 1024}),
    ("1 sequence of 1,024 tokens", {"batch": 1, "tokens": 1024}),
)
NERF = (("65,536 points, a call of the reference", {"rows": 65536}),)
BATCHES: Mapping[tuple[str, str], tuple[tuple[str, Mapping[str, int]], ...]] = {
    ("llama_prefill", paper.INFERENCE): LLAMA[1:],
    ("llama_prefill", paper.TRAINING): (LLAMA[0], LLAMA[2]),
    ("llama_decode", paper.INFERENCE): (("one token after 1,023", {"context": 1023}),),
    ("nerf", paper.INFERENCE): NERF,
    ("nerf", paper.TRAINING): NERF,
}
"""Other batches of the rows whose batch was chosen by the row; of Llama, those of its other row among them."""

COMPLETE = "concatenations of complete values may be fused"
WRITTEN = "vertical fusion writes what it saves"


def others(app: str, mode: str, graph: OperatorGraph, device: str) -> Iterator[Other]:
    """The row of ``graph`` by every other choice that changes it."""
    for what, sizes in BATCHES.get((app, mode), ()):
        yield _other(what, table2_graph(app, mode, **sizes), device)
    used, joined = table2.row(graph), table2.row(graph, complete=True)
    if joined != used:
        yield _other(COMPLETE, graph, device, complete=True)
    if mode == paper.TRAINING:
        saved = table2.other_counts(graph)[table2.SAVED]
        if saved != used.traffic_vertical:
            yield dataclasses.replace(_other(WRITTEN, graph, device), traffic_vertical=saved)


def _other(what: str, graph: OperatorGraph, device: str, complete: bool = False) -> Other:
    made = table2.row(graph, complete)
    phases = {op.name: str(op.phase) for op in graph.operators}
    times: dict[str, float] = {}
    for execution in (BULK, VERTICAL, KITSUNE):
        machine = variant_of(device, "", execution == KITSUNE)
        workload = design(graph, machine, execution, complete=complete).workload
        run = evaluate(workload, machine, app=graph.name, mode=graph.mode, execution=execution, phases=phases)
        times[execution] = run.time_s
    columns: dict[str, Any] = {name: getattr(made, name) for name in paper.COLUMNS}
    return Other(what, **columns, speedup_vertical=times[BULK] / times[VERTICAL], speedup=times[BULK] / times[KITSUNE])

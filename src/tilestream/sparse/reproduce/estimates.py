"""The estimate against simulation (Table 3)."""

from __future__ import annotations

import time

from tilestream.sparse import graphs
from tilestream.sparse.expected import estimate_program
from tilestream.sparse.reproduce import attention, models, paper
from tilestream.sparse.reproduce.study import Cell, Options, Study


def accuracy(options: Options) -> Study:
    """Operations, bytes and cycles that are expected, beside those that are simulated."""
    scale = 0.004 if options.quick else 0.02
    collab, cora = graphs.like("collab", scale=scale), graphs.like("cora_ml", scale=0.05 if options.quick else 0.2)
    cases = [
        ("GCN", models.gcn(collab)),
        ("GraphSAGE", models.graphsage(collab)),
        ("GPT-3 (block 16)", attention.case(sequence=128 if options.quick else 256, block=16)),
        ("GCN", models.gcn(cora)),
        ("", models.walks(graphs.like("cora_ml", scale=0.1 if options.quick else 0.5))),
    ]
    rows: list[dict[str, Cell]] = []
    for name, case in cases:
        published = paper.HEURISTIC.get(name)
        for fusion in paper.FUSIONS:
            options.progress(f"heuristic: {case.name}, {fusion}")
            program = case.compile(fusion)
            began = time.perf_counter()
            expected = estimate_program(program, case.inputs)
            seconds = time.perf_counter() - began
            if expected.cycles > options.most_cycles:
                continue
            made = program.run(*case.inputs)
            rows.append(
                {
                    "program": case.name,
                    "fusion": fusion,
                    "operations off, %": _percent(expected.flops, made.flops),
                    "published, % ": published[0] if published else None,
                    "bytes off, %": _percent(expected.bytes, made.bytes),
                    "published, %": published[1] if published else None,
                    "cycles off, %": _percent(expected.cycles, made.cycles),
                    "cycles": made.cycles,
                    "estimate, s": round(seconds, 3),
                }
            )
    notes = (
        "The paper's estimate is told by its user which share of coordinates survives; this one reads it off the "
        "tensors.",
        "The published errors are means over the configurations of a model on OGB-Collab; the paper has no estimate "
        "of cycles. Collab here is a random graph with its counts at a smaller scale, attention is over 256 tokens.",
    )
    return Study("heuristic", "Estimate against simulation", "Table 3", tuple(rows), notes)


def _percent(expected: float, simulated: int) -> float:
    return round(100 * abs(expected - simulated) / max(1, simulated), 2)

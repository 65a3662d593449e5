"""What index order, sparsity and the depth of channels do (Figures 15 and 18, and what the paper cannot show)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tilestream.errors import StreamDeadlock
from tilestream.sparse import graphs
from tilestream.sparse.frontend import compile
from tilestream.sparse.graphs import GraphSet
from tilestream.sparse.program import Program, compile_einsum
from tilestream.sparse.reproduce import models, paper
from tilestream.sparse.reproduce.study import Cell, Options, Study
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.search import Space, search
from tilestream.sparse.storage import Format, SparseTensor, pack

DCSR = Format(("compressed", "compressed"))
DENSE = Format(("dense", "dense"))


def nested() -> tuple[list[SparseTensor], np.ndarray]:
    """(A X) W as in Figure 18: the karate club's links, a dense [34, 34], and a half-full [34, 16]."""
    random = np.random.default_rng(0)
    adjacency = graphs.karate().adjacency.toarray()
    x = random.integers(1, 10, (34, 34)).astype(np.float64)
    weight = random.integers(1, 10, (34, 16)) * (random.random((34, 16)) < 0.5)
    operands = [pack("A", adjacency, DCSR), pack("X", x, DENSE), pack("W", weight.astype(np.float64), DCSR)]
    return operands, adjacency @ x @ weight


def orders(options: Options) -> Study:
    """All 24 orders of i, k, j, l, fused; one that wants a tensor in another order gets a permuted copy of it.

    Each with dense levels located, and with dense levels scanned and intersected as the released code's option
    ``skip-iterate-locate`` has it.
    """
    operands, expected = nested()
    rows: list[dict[str, Cell]] = []
    for order in itertools.permutations("ikjl"):
        row: dict[str, Cell] = {"order": " ".join(order)}
        exact = True
        for column, locate in (("cycles", True), ("cycles without locating", False)):
            schedule = Schedule(fuse="all", order=order, locate=locate)
            made = compile_einsum("ik,kj,jl->il", operands, schedule).run()
            exact = exact and torch.allclose(made.output, torch.from_numpy(expected))
            row[column] = made.cycles
        rows.append({**row, "exact": exact})
    rows = sorted(rows, key=lambda r: int(r["cycles without locating"] or 0))
    spread = {}
    for column in ("cycles", "cycles without locating"):
        cycles = [int(r[column] or 0) for r in rows]
        spread[column] = max(cycles) / min(cycles)
    notes = (
        f"Worst over best: {spread['cycles without locating']:.2f}x without locating, {spread['cycles']:.2f}x with it; "
        f"about {paper.ORDER_SPREAD:g}x published over 15 of the 24 orders, with the option that turns locating off.",
    )
    return Study("order", "Index orders of (A X) W", "Figure 18", tuple(rows), notes)


def counting(options: Options) -> Study:
    """Orders of the indices of a fused model: all, and those that the stored tensors' levels admit."""
    rows: list[dict[str, Cell]] = []
    for name, make in (("GCN", models.gcn), ("GraphSAGE", models.graphsage)):
        for structure in ("fused", "unfused"):
            program = make(graphs.karate()).compile("full" if structure == "fused" else "unfused", max_orders=1)
            all_, admitted = 1, 1
            for region in program.regions:
                assert region.fused is not None
                all_ *= math.factorial(len(region.order))
                admitted *= region.fused.order.count()
            published = paper.ORDERS[name] if structure == "fused" else (None, None)
            rows.append(
                {
                    "model": name,
                    "regions": structure,
                    "indices": sum(len(region.order) for region in program.regions),
                    "orders": all_,
                    "published orders": published[0],
                    "admitted": admitted,
                    "published, admitted": published[1],
                    "fewer by": f"{1 - admitted / all_:.1%}",
                    "published, fewer by": f"{1 - (published[1] or 0) / published[0]:.1%}" if published[0] else None,
                }
            )
    notes = (
        "The published counts are of far more index variables than 6 or 7 (which ones is not said); here an index that "
        "two operators share is one. What may be compared is the share that formats take away: 68.5 % to 99.9 % "
        "published. Dense tensors and weights are stored in whatever order is wanted and constrain nothing here.",
    )
    return Study("counting", "Index orders", "Table 4", tuple(rows), notes)


def sparsity(options: Options) -> Study:
    """A two-layer GCN of 500 nodes and 128 features against its graph's sparsity and structure."""
    nodes, width = (120, 32) if options.quick else (500, 128)
    makers: dict[str, Callable[[float], object]] = {
        "uniform": lambda d: graphs.uniform(nodes, d),
        "power law": lambda d: graphs.power_law(nodes, round(nodes * nodes * d / 2)),
        "block diagonal": lambda d: graphs.block_diagonal(nodes, d),
    }
    rows: list[dict[str, Cell]] = []
    for structure, make in makers.items():
        for sparse in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
            graph = GraphSet(f"{structure} {sparse:.0%}", make(1 - sparse), width, 16, real=False)  # type: ignore[arg-type]
            case = models.gcn(graph)
            options.progress(f"sparsity: {graph.name}")
            found = {f: models.measure(case, case.compile(f), min(1e8, options.most_cycles)) for f in paper.FUSIONS}
            first = found["unfused"].cycles
            rows.append(
                {
                    "structure": structure,
                    "sparsity": f"{sparse:.0%}",
                    **{f: m.cycles for f, m in found.items()},
                    "partial speedup": round(first / found["partial"].cycles, 3),
                    "full speedup": round(first / found["full"].cycles, 4),
                    "full is": found["full"].how,
                    "error": max(m.error or 0.0 for m in found.values()),
                }
            )
    notes = ("Published (no values): partial fusion gains more the sparser the graph is, full fusion slows down.",)
    return Study("sparsity", f"GCN of {nodes} nodes, {width} features", "Figure 15", tuple(rows), notes)


def pareto(options: Options) -> Study:
    """The front that search finds for a GCN on the karate club: fusions, orders and lanes."""
    case = models.gcn(graphs.karate())

    def make(schedule: Schedule) -> Program:
        return compile(case.module, *case.inputs, formats=case.formats, schedule=schedule)

    space = Space(orders=2, factors=(2,) if options.quick else (2, 4, 8))
    found = search(make, case.inputs, space, budget_s=600, progress=options.progress)
    rows: list[dict[str, Cell]] = [
        {
            "cycles": p.cycles,
            "bytes": p.bytes,
            "on-chip bytes": p.on_chip_bytes,
            "estimated cycles": round(p.estimate.cycles),
            "schedule": str(p.schedule),
        }
        for p in found.front
    ]
    notes = (
        f"{found.estimated} schedules were estimated, {found.pruned} dropped, {len(found.points)} simulated; on-chip "
        "memory is 64 tokens in every channel and the accumulators.",
    )
    return Study("search", f"Search: {case.name}", "nothing published", tuple(rows), notes)


DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)


def channels(options: Options) -> Study:
    """Cycles against the slots of every channel, for GCN and attention; the reference is channels without a bound."""
    from tilestream.sparse.reproduce import attention

    cases = [(models.gcn(graphs.karate()), fusion) for fusion in paper.FUSIONS]
    sets = [(f"{case.name}, {fusion}", case.compile(fusion), case.inputs) for case, fusion in cases]
    small = attention.case(sequence=64, heads=2, width=16, block=8)
    sets += [(f"attention, {fusion}", small.compile(fusion), small.inputs) for fusion in ("unfused", "full")]
    rows: list[dict[str, Cell]] = []
    for name, program, inputs in sets:
        options.progress(f"channels: {name}")
        rows += depths(name, program, inputs)
    notes = (
        "Deadlock: how many nodes wait for each other, and the first of them that has no room.",
        "A deadlock is a property of a graph whose branches part and meet again: the branch that waits has to hold "
        "what the other one reads first. The paper's simulator gives every channel ten million slots.",
    )
    return Study("channels", "Bounded channels", "nothing: the paper's channels have no bound", tuple(rows), notes)


def depths(name: str, program: Program, inputs: Sequence[Any]) -> list[dict[str, Cell]]:
    """A row a depth, up to the first at which nothing is lost."""
    free = program.run(*inputs).cycles
    rows: list[dict[str, Cell]] = []
    for depth in DEPTHS:
        row: dict[str, Cell] = {"program": name, "depth": depth}
        try:
            cycles = program.run(*inputs, depth=depth).cycles
        except StreamDeadlock as error:
            rows.append({**row, "cycles": None, "slower": None, "deadlock": _short(error.cause)})
            continue
        rows.append({**row, "cycles": cycles, "slower": f"{cycles / free - 1:.2%}", "deadlock": None})
        if cycles == free:
            break
    return rows


def _short(cause: str) -> str:
    """Of a deadlock's cycle: how many nodes wait, and which of them for room."""
    full = re.findall(r"(\S+) waits for room in (\S+)", cause)
    first = f"; {full[0][0]} has no room in {full[0][1]}" if full else ""
    return f"{cause.count(' waits for ')} nodes{first}"

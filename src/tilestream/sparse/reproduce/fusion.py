"""Fusion of GCN, GraphSAGE and SAE: unfused, a region a layer, and one region for all (Figure 12)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tilestream.apps.sparse.sae as sae_app
from tilestream.sparse import graphs
from tilestream.sparse.graphs import GraphSet
from tilestream.sparse.program import compile_einsum
from tilestream.sparse.reproduce import models, paper
from tilestream.sparse.reproduce.models import Case
from tilestream.sparse.reproduce.study import Cell, Options, Study, off
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import pack

SETS = ("cora", "cora_ml", "dblp", "collab")
WALKS = "walks of two edges"


def graph_of(name: str, options: Options) -> GraphSet:
    """A data set's graph where its file is known, or a random one with its counts; smaller if the options say quick."""
    path = options.cora if name == "cora" else None
    if path or os.environ.get(graphs.FILES.get(name, "")):
        return graphs.load(name, str(path) if path else None)
    return graphs.like(name, scale=_scale(name, options), two_paths=_implied(name))


def _scale(name: str, options: Options) -> float:
    return {"cora": 0.5, "cora_ml": 0.5, "dblp": 0.1, "collab": 0.02}[name] if options.quick else 1.0


def fits(name: str, graph: GraphSet) -> dict[str, str]:
    """What was read off the published cycles, by fusion: such a row is no result.

    The order of the unfused products is what the cycles of Cora show. A random graph of DBLP's counts is told the walks
    of two edges that the published full fusion implies, since nobody publishes them.
    """
    found = {"unfused": "order"} if name == "cora" else {}
    return found | ({"full": WALKS} if not graph.real and _implied(name) else {})


def untold(name: str, graph: GraphSet, options: Options) -> GraphSet | None:
    """A random graph like ``graph`` that is not told its walks; None where ``graph`` is not told them either."""
    return graphs.like(name, scale=_scale(name, options)) if WALKS in fits(name, graph).values() else None


def _implied(name: str) -> int:
    """Walks of two edges by the published full fusion; 0 where they are known, or do not bound it."""
    counts = graphs.COUNTS[name]
    if name not in graphs.FILES or name == "cora" or counts.two_paths:
        return 0
    return paper.walks("GCN", name, counts.features)


def rows_of(
    case: Case,
    figures: Sequence[int] | None,
    options: Options,
    note: str = "",
    fits: Mapping[str, str] | None = None,
    fusions: Sequence[str] = paper.FUSIONS,
    first: int = 0,
    **choices: Any,
) -> list[dict[str, Cell]]:
    """A row a fusion: cycles and speedups beside ``figures`` (unfused, partial, full), where they are comparable.

    ``fits``: by fusion, what was read off the published figure itself, so that the row is no result. ``first``: cycles
    that speedups are over; without, those of the first row. ``choices``: of the schedule.
    """
    rows: list[dict[str, Cell]] = []
    for fusion in fusions:
        options.progress(f"{case.name}, {fusion}")
        found = models.measure(case, case.compile(fusion, **choices), options.most_cycles)
        first = first or found.cycles
        published = figures[paper.FUSIONS.index(fusion)] if figures else None
        rows.append(
            {
                "data": case.name + (f", {note}" if note else ""),
                "fusion": fusion,
                "cycles": found.cycles,
                "how": found.how,
                "published": published,
                "off": off(found.cycles, published),
                "fitted": (fits or {}).get(fusion),
                "speedup": round(first / found.cycles, 3),
                "published speedup": round(figures[0] / published, 3) if figures and published else None,
                "operations": found.flops,
                "bytes": found.bytes,
                "error": found.error,
            }
        )
    return rows


def _sets(model: str, make: Callable[[GraphSet], Case], options: Options) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    for name in SETS:
        graph = graph_of(name, options)
        figures = paper.FIGURE12[model][name]
        made = rows_of(make(graph), figures, options, fits=fits(name, graph))
        rows += made
        other = untold(name, graph, options)
        if other is not None:
            first = int(made[0]["cycles"] or 0)
            rows += rows_of(make(other), figures, options, UNTOLD, fusions=("full",), first=first)
    return rows


UNTOLD = "not told its walks"


def by_default(options: Options) -> Study:
    """GraphSAGE and GCN on Cora in the orders that the compiler takes by itself."""
    cora = graph_of("cora", options)
    rows: list[dict[str, Cell]] = []
    for model, case in (("GCN", models.gcn(cora)), ("GraphSAGE", models.graphsage(cora))):
        rows += rows_of(replace(case, orders={}), paper.FIGURE12[model]["cora"], options)
    notes = ("Nothing here was chosen for the figures that it stands beside.",)
    return Study("defaults", "GCN and GraphSAGE, orders by default", paper.ARTIFACT, tuple(rows), notes)


def gcn(options: Options) -> Study:
    """GCN with the real links of Cora, and on random graphs with the counts of the other sets."""
    notes = (
        "A is not normalised, X is dense, the hidden width is 16, and 60 % of the weights are zero: the defaults of "
        "the released generator. Dense levels are located. Unfused, A X runs over neighbours innermost.",
        "Partial fusion runs the operators of a layer side by side: its cycles are those of the slowest one. Full "
        "fusion computes the first layer again for every neighbour: edges become walks of two edges.",
        "Estimated rows would take too long to simulate; the table of estimates says how far they are off.",
        "A name that ends in -like is a random graph with the set's counts of nodes and edges, as its file was not "
        "given (TILESTREAM_CORA_ML, TILESTREAM_DBLP). That of Cora_ML also has the set's 292,482 walks of two edges, "
        "as expected of its degrees. Those of DBLP are not known here: its random graph is told the walks that the "
        "published full fusion implies, which makes that row a fit; below it stands full fusion on one that is not "
        "told them.",
        "DBLP was published without locating in dense levels (next table). On Collab, GraphSAGE's unfused run, which "
        "has one more product X W than GCN's, takes 513,013,418 cycles more: 17 x nodes x features within 0.05 %, the "
        "cost of weights without zeros. The orderings agree everywhere: partial is fastest, full slowest.",
    )
    return Study("gcn", "GCN", paper.ARTIFACT, tuple(_sets("GCN", models.gcn, options)), notes)


def graphsage(options: Options) -> Study:
    """GraphSAGE on the same graphs."""
    notes = (
        "The published full fusion of GraphSAGE has GCN's cycles within 0.001 %. That is no copy: in both, the slowest "
        "node streams features over walks of two edges (Cora, Cora_ML, DBLP), or A's rows meet each other, nodes x "
        "(nodes + 1) steps (Collab); it is so here too.",
        "Partial fusion gains more here: X Ws and A X Wn run side by side. The published cycles of Cora exceed "
        "GCN's by 7.8e6, those of Cora_ML by 38e6 and those of Collab by 96e6. That is not explained. All three are "
        "5.25 x nodes x features + 1.15 x edges x features within 0.5 %, which is no stage of ours. None of the "
        "index orders of the fused layer that were estimated on Cora, with and without locating, comes to its "
        "cycles: the nearest is 3.8 % under, without locating, whose further nodes x (nodes + 1) steps are a "
        "quarter of what Cora_ML lacks. Nor do other weights fit: X Ws alone would need them 55 %, 66 % and 98 % "
        "full, and the unfused run of Cora, which adds two such products up, has them 43 % full. Nor that a row "
        "waits for the row before: 6.5 % over GCN's on Cora, where 26 % are published.",
    )
    return Study("graphsage", "GraphSAGE", paper.ARTIFACT, tuple(_sets("GraphSAGE", models.graphsage, options)), notes)


def variants(options: Options) -> Study:
    """What the released code does not fix: order, locating, weights and self loops, on Cora and DBLP."""
    cora = graph_of("cora", options)
    dblp = graph_of("dblp", options)
    rows: list[dict[str, Cell]] = []
    read: tuple[tuple[str, str, Case, dict[str, Any]], ...] = (
        ("cora", "a row of X for each link", replace(models.gcn(cora), orders=models.ROW_ORDERS), {}),
        ("cora", "the same, without locating", replace(models.gcn(cora), orders=models.ROW_ORDERS), {"locate": False}),
        ("cora", "weights 50 % full", models.gcn(cora, 0.5), {}),
        ("cora", "self loops added", models.gcn(cora.with_self_loops()), {}),
        ("dblp", "a row of X for each link", replace(models.gcn(dblp), orders=models.ROW_ORDERS), {}),
        ("dblp", "the same, without locating", replace(models.gcn(dblp), orders=models.ROW_ORDERS), {"locate": False}),
    )
    for data, note, case, choices in read:
        told = {"full": WALKS} if data == "dblp" and fits("dblp", dblp) else None
        rows += rows_of(case, paper.FIGURE12["GCN"][data], options, note, told, **choices)
    nodes = graphs.COUNTS["dblp"].nodes
    notes = (
        f"Without locating, A meets every row of X and of the hidden layer: nodes x (nodes + 1) steps a layer. Twice "
        f"that is {2 * nodes * (nodes + 1):,} on DBLP; partial fusion is published with "
        f"{paper.FIGURE12['GCN']['dblp'][1]:,}. So DBLP was run without locating, and Cora and Cora_ML, whose figures "
        "do not have these terms, with it.",
        "Full fusion on OGB-Collab is nodes x (nodes + 1) as well, with and without locating: A's own rows are "
        "compressed and are met, not located.",
    )
    return Study("gcn-notes", "GCN, other readings", paper.ARTIFACT, tuple(rows), notes)


def sae(options: Options) -> Study:
    """The autoencoder at the paper's 50 % and the script's 90 % pruning, and the shape that was released."""
    rows = []
    for name, (pixels, hidden) in sae_app.SIZES.items():
        share = {"imagenet": 4, "nih": 128, "luna16": 32}[name] * (16 if options.quick else 1)
        for density in (0.5, 0.1):
            case = models.sae(pixels // share, hidden, sae_app.BATCH, density)
            note = f"{name}, {pixels // share:,} pixels, batch {sae_app.BATCH}, weights {density:.0%} full"
            rows += [{**row, "published": None, "off": None} for row in rows_of(case, None, options, note)]
    rows += _one_image(options)
    rows = [_beside(row) for row in rows]
    notes = (
        f"The paper's {paper.SAE_SPEEDUP}x is what a batch of {sae_app.BATCH} gives: encoder and decoder take the same "
        "cycles a row and overlap but for one row, 2 B / (B + 1) = 1.94 at B = 32. Pixels are a share of the data "
        "set's: cycles grow with them, the ratio does not.",
        "The released cycles (81,273 + 264 + 26,785 + 791 unfused) fit ONE image of 784 pixels, hidden width 256 and "
        "60 % pruned weights, which were read off them: "
        "784 x (102 + 1) = 80,752; 256 + 8; 784 + 7. With one row nothing overlaps, since the "
        "decoder waits for sums over all pixels: full fusion (162,480 = 2 x 81,240) costs both, one after the other. "
        "Unfused, the decoder reads the ReLU's result without its zeros (26,785 cycles are about 86 of 256 rows); "
        "fused, the zeros stay in the stream. Hence 0.67x: fusion loses the sparsity that storing activations finds.",
    )
    return Study("sae", "Sparse autoencoder", paper.ARTIFACT, tuple(rows), notes)


def _beside(row: dict[str, Cell]) -> dict[str, Cell]:
    """A row of the autoencoder with the text's speedups where its weights are the text's 50 % full; and marked as a fit
    where it is the image whose size was read off the released cycles."""
    data = str(row["data"])
    if "one image" in data:
        return {**row, "fitted": ONE_IMAGE if row["published"] else None}
    told = {"partial": paper.SAE_PARTIAL_SPEEDUP, "full": paper.SAE_SPEEDUP} if "weights 50%" in data else {}
    return {**row, "published speedup": told.get(str(row["fusion"]))}


ONE_IMAGE = "784 pixels, 40 % of the weights kept"


def _one_image(options: Options) -> list[dict[str, Cell]]:
    """The released shape: one image, and the decoder on activations whose zeros were dropped when they were stored."""
    case = models.sae(784, 256, 1, 0.4)
    program = case.compile("unfused")
    ran = program.run(*case.inputs)
    regions = [r.name for r in program.regions]
    activations = ran.tensors[regions[2]].to_dense().reshape(1, -1)
    stored = pack("H", activations, models.DCSR)
    decoder = pack("D", case.module.get_parameter("decoder").detach().numpy(), models.DCSR)
    dropped = compile_einsum("ik,kj->ij", [stored, decoder], Schedule(order=("i", "k", "j"))).run()
    kept = ran.cycles - ran.regions[regions[3]].cycles + dropped.cycles
    full = case.compile("full").run(*case.inputs)
    published = paper.FIGURE12["SAE"]["imagenet"]
    name = "SAE, one image of 784 pixels, weights 40 % full"
    share = f"zeros dropped: {stored.nnz} of 256 stored"
    rows: list[dict[str, Cell]] = []
    for label, fusion, cycles, reference in (
        (f"{name}, {share}", "unfused", kept, published[0]),
        (f"{name}, zeros kept", "unfused", ran.cycles, None),
        (name, "full", full.cycles, published[2]),
    ):
        rows.append(
            {
                "data": label,
                "fusion": fusion,
                "cycles": cycles,
                "how": "simulated",
                "published": reference,
                "off": off(cycles, reference),
                "speedup": round(kept / cycles, 3),
                "published speedup": round(published[0] / reference, 3) if reference else None,
                "error": case.error(full),
            }
        )
    return rows

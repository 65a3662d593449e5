"""Fusion of GCN, GraphSAGE and SAE: unfused, a region a layer, and one region for all (Figure 12)."""

from __future__ import annotations

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


def graph_of(name: str, options: Options) -> GraphSet:
    """A data set's graph, or a random one with its counts; smaller if the options say quick."""
    if name == "cora":
        return graphs.cora(options.cora)
    scale = {"cora_ml": 0.5, "dblp": 0.1, "collab": 0.02}[name] if options.quick else 1.0
    return graphs.like(name, scale=scale)


def rows_of(
    case: Case,
    figures: Sequence[int] | None,
    options: Options,
    note: str = "",
    fits: Mapping[str, str] | None = None,
    **choices: Any,
) -> list[dict[str, Cell]]:
    """A row a fusion: cycles and speedups beside ``figures`` (unfused, partial, full), where they are comparable.

    ``fits``: by fusion, what was read off the published figure itself, so that the row is no result. ``choices``: of
    the schedule.
    """
    rows: list[dict[str, Cell]] = []
    first = 0
    for index, fusion in enumerate(paper.FUSIONS):
        options.progress(f"{case.name}, {fusion}")
        found = models.measure(case, case.compile(fusion, **choices), options.most_cycles)
        first = first or found.cycles
        published = figures[index] if figures else None
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
                "published speedup": round(figures[0] / figures[index], 3) if figures else None,
                "operations": found.flops,
                "bytes": found.bytes,
                "error": found.error,
            }
        )
    return rows


def _sets(model: str, make: Callable[[GraphSet], Case], options: Options) -> list[dict[str, Cell]]:
    rows = []
    for name in SETS:
        case = make(graph_of(name, options))
        rows += rows_of(case, paper.FIGURE12[model][name], options, fits=fits(model, name))
    return rows


def fits(model: str, data: str) -> dict[str, str]:
    """What was read off the published cycles of a row, by fusion: such a row is no result.

    The order of the unfused products is what the cycles of Cora show; of a graph whose walks of two edges nobody
    publishes, full fusion's cycles over features + 1 are taken to be their number.
    """
    found = {"unfused": "order"} if data == "cora" else {}
    if graphs.COUNTS[data].two_paths:
        found["full"] = "walks of two edges"
    return found


def by_default(options: Options) -> Study:
    """GraphSAGE and GCN on Cora in the orders that the compiler takes by itself."""
    cora = graphs.cora(options.cora)
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
        "Cora_ML, DBLP and Collab are random graphs with the counts of nodes and edges of the sets, the first two with "
        "their walks of two edges as well, as the published full fusion implies them.",
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
        "Partial fusion gains more here: X Ws and A X Wn run side by side. The published cycles of Cora exceed GCN's "
        "by 7.8e6 and those of Cora_ML by 38e6, which no common stage explains.",
    )
    return Study("graphsage", "GraphSAGE", paper.ARTIFACT, tuple(_sets("GraphSAGE", models.graphsage, options)), notes)


def variants(options: Options) -> Study:
    """What the released code does not fix: order, locating, weights and self loops, on Cora and DBLP."""
    cora = graphs.cora(options.cora)
    dblp = graph_of("dblp", options)
    rows: list[dict[str, Cell]] = []
    for data, note, case, choices in (
        ("cora", "a row of X for each link", replace(models.gcn(cora), orders=models.ROW_ORDERS), {}),
        ("cora", "the same, without locating", replace(models.gcn(cora), orders=models.ROW_ORDERS), {"locate": False}),
        ("cora", "weights 50 % full", models.gcn(cora, 0.5), {}),
        ("cora", "self loops added", models.gcn(cora.with_self_loops()), {}),
        ("dblp", "a row of X for each link", replace(models.gcn(dblp), orders=models.ROW_ORDERS), {}),
        ("dblp", "the same, without locating", replace(models.gcn(dblp), orders=models.ROW_ORDERS), {"locate": False}),
    ):
        rows += rows_of(case, paper.FIGURE12["GCN"][data], options, note, None, **choices)
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
    notes = (
        f"The paper's {paper.SAE_SPEEDUP}x is what a batch of {sae_app.BATCH} gives: encoder and decoder take the same "
        "cycles a row and overlap but for one row, 2 B / (B + 1) = 1.94 at B = 32. Pixels are a share of the data "
        "set's: cycles grow with them, the ratio does not.",
        "The released cycles (81,273 + 264 + 26,785 + 791 unfused) fit ONE image of 784 pixels, hidden width 256 and "
        "60 % pruned weights: 784 x (102 + 1) = 80,752; 256 + 8; 784 + 7. With one row nothing overlaps, since the "
        "decoder waits for sums over all pixels: full fusion (162,480 = 2 x 81,240) costs both, one after the other. "
        "Unfused, the decoder reads the ReLU's result without its zeros (26,785 cycles are about 86 of 256 rows); "
        "fused, the zeros stay in the stream. Hence 0.67x: fusion loses the sparsity that storing activations finds.",
    )
    return Study("sae", "Sparse autoencoder", paper.ARTIFACT, tuple(rows), notes)


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

"""A sparse GCN on the karate club: unfused, by layers, in one region, as ragged pipelines; then a search, and a page.

python examples/sparse_gcn.py [OUT]     writes OUT/gcn.html, by default under sparse-out
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tilestream import cuda
from tilestream.apps.sparse import GCN
from tilestream.sparse import Format, Schedule, compile, graphs, report
from tilestream.sparse.pipelines import PipelineProgram
from tilestream.sparse.search import Space, search

CSF = Format(("compressed", "compressed"))


def main(folder: Path) -> None:
    graph = graphs.karate()
    model = GCN(features=34, hidden=16, classes=2)
    inputs = (graph.torch(), torch.rand(graph.nodes, 34, dtype=torch.float64))
    formats = {"adjacency": CSF, "weight1": CSF, "weight2": CSF}

    layers = (("matmul", "matmul_1", "add", "relu"), ("matmul_2", "matmul_3", "add_1", "softmax"))
    schedules = {
        "unfused": Schedule(),
        "a region a layer": Schedule(fuse=layers),
        "one region": Schedule(fuse="all"),
    }
    for name, schedule in schedules.items():
        program = compile(model, *inputs, formats=formats, schedule=schedule)
        result = program.run(*inputs)
        error = (result.output - model(*inputs)).abs().max().item()
        print(f"{name:17} {result.cycles:7,} cycles, {result.bytes:9,} bytes, error {error:.0e}")

    found = search(
        lambda schedule: compile(model, *inputs, formats=formats, schedule=schedule),
        inputs,
        Space(orders=2, factors=(2, 4)),
        budget_s=5,
        progress=lambda line: print(line, file=sys.stderr),
    )
    print(f"best of {found.estimated} schedules: {found.best.cycles:,} cycles")
    print(found.best.schedule)

    target = "cuda" if not cuda.available() else "reference"
    (output,) = PipelineProgram(compile(model, *inputs, formats={"adjacency": CSF}), target).run(*inputs)
    print(f"as pipelines ({target}): error {(output - model(*inputs)).abs().max().item():.0e}")

    program = compile(model, *inputs, formats=formats, schedule=Schedule(fuse=layers))
    result = program.run(*inputs)
    regions = [(r.name, r.graph, result.regions[r.name], str(r.table)) for r in program.regions]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gcn.html").write_text(report.page("GCN on the karate club", regions), encoding="utf-8")
    print(f"page: {folder / 'gcn.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("sparse-out"))

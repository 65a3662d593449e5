"""Digests of generated CUDA, for ``test_golden_cuda.py``. ``python tests/lib/golden_cuda.py`` writes them again.

Neither the cost model nor a clock has a say in which pipelines these are, so a digest changes with the code generator,
the schedule or the front end alone.
"""

from __future__ import annotations

import functools
import hashlib
import json

import torch
from convolutions import TAILS
from gpu_pipelines import NAMED, one_stage
from places import GOLDEN

from benchmarks.lib.edge_layers import edge_conv
from tilestream import devices
from tilestream.apps import APPS
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.stream.emit import emit
from tilestream.plan.passes.cuts import cut_vertical
from tilestream.plan.passes.forms import load_directly
from tilestream.plan.passes.settings import choose_in_flight, choose_placement, choose_residency

FILE = GOLDEN / "cuda.json"
MODELS = tuple(APPS)
"""README's cases are all among them."""
EDGES = {
    "edge_conv_direct": lambda: one_stage(load_directly(edge_conv(64, 64, 128, ()))),
    "edge_conv_summed": lambda: one_stage(load_directly(edge_conv(64, 64, 128, ("max", "sum")))),
    "edge_conv_summed_by_loaders": lambda: one_stage(edge_conv(16, 64, 40, ("min",))),
}
PIPELINES = (
    NAMED | {name: functools.partial(lambda make: one_stage(make()), make) for name, make in TAILS.items()} | EDGES
)


def of_pipeline(pipeline: Pipeline) -> list[str]:
    """A digest of the text of every launch."""
    return [hashlib.sha256(emit(launch).text.encode()).hexdigest()[:16] for launch in cut_at_dram(pipeline)]


def of_model(name: str) -> list[str]:
    """Digests of the vertical kernels of every region of a model."""
    torch._dynamo.reset()
    module, inputs = APPS[name].make(rows=256)
    found = []
    device = devices.get("h200")
    for graph in capture(module, inputs).graphs:
        for region in partition(graph).regions:
            stages = choose_residency(choose_placement(cut_vertical(region.program, device), device), device)
            found += of_pipeline(choose_in_flight(stages))
    return found


def main() -> None:
    made = {f"model {name}": of_model(name) for name in MODELS} | {
        name: of_pipeline(make()) for name, make in PIPELINES.items()
    }
    FILE.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

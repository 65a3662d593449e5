"""Graphs whose regions are calls, without Inductor: what the operator computes on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tilestream import reference
from tilestream.devices import get
from tilestream.graph.capture import boxed
from tilestream.graph.region import Region
from tilestream.graph.selection import Partition, partition
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan.planner import plan
from tilestream.run import fallback, inductor
from tilestream.run.call import RegionCall
from tilestream.run.executable import Enqueue, Executable, Interpreted
from tilestream.run.place import place
from tilestream.run.spec import spec_of


def interpreted(region: Region, pipeline: Pipeline | None = None) -> RegionCall:
    """The region's program, or another pipeline for it, on the reference machine."""

    def run(p: Pipeline, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return reference.run(p, tensors)

    spec = spec_of(region, pipeline or region.program, "reference")
    return RegionCall(spec, torch.device("cpu"), lambda p: Interpreted(p, run))


def stream(graph: fx.GraphModule, strategy: str = "vertical") -> tuple[Partition, list[Region]]:
    """Put calls in the place of the graph's regions, in ``graph`` itself, so that it runs on the reference machine."""

    def pipeline_of(region: Region) -> Pipeline | None:
        made = plan(region.program, region.rows, get("h200"), Options(strategy=strategy))  # pyright: ignore
        return made.chosen.pipeline

    found = partition(graph)
    return found, place(graph, found, pipeline_of, "reference")


class Altered:
    """An executable whose outputs are changed in place after it ran: one that computes something else."""

    def __init__(self, right: Executable, outputs: int, change: Callable[[Tensor], object]) -> None:
        self.right, self.outputs, self.change = right, outputs, change

    def bind(self, tensors: Mapping[str, Tensor], rows: int, written: Sequence[str]) -> Enqueue:
        enqueue = self.right.bind(tensors, rows, written)

        def run(new: Sequence[Tensor]) -> None:
            enqueue(new)
            for tensor in new[: self.outputs]:
                self.change(tensor)

        return run


def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not taken runs eagerly: Inductor's compiler would take most of the time."""
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)
    monkeypatch.setattr(inductor, "compile_inner", eagerly)


def eagerly(graph: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """In the place of ``run.inductor.compile_inner``: the graph with its regions as calls, operator by operator.

    Inductor's C++ compiler takes most of a test's time; what it makes of the rest is not ours to test again and again.
    """

    def call(arguments: list[Any]) -> Any:
        with torch.no_grad():
            return graph.forward(*arguments)

    return boxed(call), []

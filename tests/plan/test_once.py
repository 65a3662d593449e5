"""What planning asks for again and again of one program is computed once, and hashes do not leave the process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tilestream import cuda, devices
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.ir import plain as plain_form
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.kernels.families import FAMILIES, kernel_of
from tilestream.kernels.fits import verify_on
from tilestream.kernels.kernel import Kernel
from tilestream.kernels.product.finder import Finder
from tilestream.options import Options
from tilestream.plan import cost
from tilestream.plan.planner import proposals


@pytest.fixture(scope="module")
def program() -> Pipeline:
    """A feed-forward block on one row."""
    block = nn.Sequential(nn.Linear(96, 1536), nn.GELU(), nn.Linear(1536, 96)).bfloat16()
    (graph,) = capture(block, [torch.randn(1, 96).bfloat16()]).graphs
    (region,) = partition(graph).regions
    return region.program


def test_a_block_is_found_once_in_a_program(program: Pipeline, monkeypatch: pytest.MonkeyPatch):
    """Its candidates differ in how they divide it, and their kernels are made of what was found; what comes back from
    disk is matched once."""
    read: list[Pipeline] = []
    block = Finder.block
    monkeypatch.setattr(Finder, "block", lambda self: read.append(self.pipeline) or block(self))
    found = proposals(replace(program, name="again"), 1, devices.get("h200"), Options())
    shared = [c.pipeline for c in found if c.pipeline is not None and c.strategy == "shared"]
    for pipeline in shared:
        cuda.sources(pipeline)
    assert len(shared) > 3 and len(read) == 1
    again = pipeline_from_json(pipeline_to_json(shared[0]))
    for _ in range(3):
        assert kernel_of(again).source().text == cuda.sources(shared[0])[0].text
        verify_on(again, devices.get("h200"))
    assert len(read) <= 2


def test_a_launch_is_matched_once(program: Pipeline, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    for family in FAMILIES:

        def matches(launch: Pipeline, kind: type[Kernel] = family, whole: Callable[..., bool] = family.matches) -> bool:
            asked.append(kind.family)
            return whole(launch)

        monkeypatch.setattr(family, "matches", matches)
    (tiled,) = [c.pipeline for c in proposals(program, 1, devices.get("h200"), Options(strategy="shared"))][1:2]
    assert tiled is not None
    asked.clear()
    launch = replace(tiled, name="again")
    for _ in range(3):
        verify_on(launch, devices.get("h200"))
        cost.predict(launch, 1, devices.get("h200"))
        cuda.sources(launch)
    assert asked == ["segments", "one row", "shared tile"]


def test_of_equal_objects_each_has_its_own(program: Pipeline):
    asked: list[str] = []

    @once
    def lines(p: Pipeline) -> str:
        asked.append(p.stages[0].source)
        return asked[-1]

    ops = tuple(replace(op, source="mine.py:3") for op in program.stages[0].ops)
    same = program.with_stages((replace(program.stages[0], ops=ops),))
    assert same == program and hash(same) == hash(program)
    assert (lines(same), lines(same), lines(program)) == ("mine.py:3", "mine.py:3", program.stages[0].source)
    assert len(asked) == 2


def test_an_exception_is_raised_anew():
    @once
    def refuses(p: Pipeline) -> str:
        raise ValueError(p.name)

    empty = Pipeline("empty", (), ())
    for _ in range(2):
        with pytest.raises(ValueError, match="empty"):
            refuses(empty)


def test_a_pickled_pipeline_has_no_hash_of_another_process(program: Pipeline):
    hash(program)
    plain_form.plain(program)
    back = pickle.loads(pickle.dumps(program))
    assert not any("hash" in name for name in back.__dict__) and back == program and hash(back) == hash(program)

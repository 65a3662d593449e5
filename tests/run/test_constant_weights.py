"""Weights that lie transposed: what copying them is predicted to take, and copies that are made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from real_blocks import Gpt2Block

from tilestream import devices
from tilestream.errors import OptionError
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options, parse
from tilestream.plan import few_rows, planner
from tilestream.plan.candidates import FALLBACK
from tilestream.plan.turned import NONE, turned
from tilestream.reference.whole import run_whole
from tilestream.run.call import RegionCall
from tilestream.run.executable import Enqueue, Interpreted
from tilestream.run.spec import decode, encode, spec_of

H200 = devices.get("h200")
CONSTANT = Options(constant_weights=True)


def region_of(width: int, hidden: int, rows: int) -> Region:
    torch.compiler.reset()
    x = torch.randn(rows, width, device="meta", dtype=torch.bfloat16)
    with torch.no_grad():
        (graph,) = capture(Gpt2Block(width, hidden).bfloat16().eval().to("meta"), (x,)).graphs
    (region,) = partition(graph).regions
    return region


def test_what_is_turned_is_predicted_for_few_rows() -> None:
    """[768, 3072] and [3072, 768] side by side: a launch, and 4.7 MB at 0.13 TB/s."""
    region = region_of(768, 3072, 16)
    found = turned(region, Options())
    assert len(found.weights) == 2 and 37 < found.us < 38
    assert turned(region, CONSTANT) == NONE
    each = [planner.plan(region.program, 16, H200, o, turned=turned(region, o)) for o in (Options(), CONSTANT)]
    assert [p.chosen.strategy for p in each] == [FALLBACK, few_rows.STRATEGY]
    best = [min(c.predicted_us or 1e9 for c in p.candidates if c.strategy == few_rows.STRATEGY) for p in each]
    assert best[0] - best[1] == pytest.approx(found.us)


def test_plans_of_turned_weights_are_others() -> None:
    region = region_of(48, 520, 16)
    given = (region.program, 16, H200, Options())
    asked = planner.question(*given, turned(region, Options())), planner.question(*given)
    assert asked[0].key(measured=True) != asked[1].key(measured=True)


class Reader:
    """An executable that notes what it is given to read in place."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.run, self.given = Interpreted(pipeline, run_whole), []

    def bind(self, tensors: Mapping[str, torch.Tensor], rows: int, written: Sequence[str]) -> Enqueue:
        self.given.append(tensors)
        return self.run.bind(tensors, rows, written)


def call_of(region: Region, constant: bool) -> tuple[RegionCall, list[Reader]]:
    made: list[Reader] = []

    def build(pipeline: Pipeline) -> Reader:
        made.append(Reader(pipeline))
        return made[-1]

    spec = decode(encode(spec_of(region, region.program, "cuda", constant)))
    return RegionCall(spec, torch.device("cpu"), build, rescue=False), made


def values_of(region: Region) -> list[torch.Tensor]:
    torch.manual_seed(0)
    fakes = [n.meta["val"] for n in region.graph.graph.nodes if n.op == "placeholder"]
    return [(torch.randn(f.shape) / f.shape[-1] ** 0.5).bfloat16() for f in fakes]


def test_a_constant_weight_is_copied_once_and_again_where_torch_counts_a_change() -> None:
    region = replace(region_of(48, 520, 3), device=torch.device("cpu"))
    call, readers = call_of(region, constant=True)
    values = values_of(region)
    weights = {p.tensor: values[p.index] for p in region.parameters if ("t",) in p.steps}
    first = call(values)[0]
    second = call([v.clone() if v.shape[0] == 3 else v for v in values])[0]  # other addresses, the same weights
    one, two = (r.given[-1] for r in readers)
    assert torch.equal(first, second)
    assert all(one[n].is_contiguous() and one[n].data_ptr() == two[n].data_ptr() for n in weights)
    for weight in weights.values():
        weight.zero_()
    third = call(values)[0]
    assert not torch.equal(first, third) and not readers[-1].given[-1][next(iter(weights))].any()
    plain, others = call_of(region, constant=False)
    assert torch.equal(plain(values)[0], third)
    assert not any(others[0].given[-1][n].is_contiguous() for n in weights)


def test_a_copy_goes_with_its_weights_memory() -> None:
    region = replace(region_of(48, 520, 3), device=torch.device("cpu"))
    call, _ = call_of(region, constant=True)
    values = values_of(region)
    call(values)
    kept = list(call._copies._kept.values())
    assert len(kept) == 2 and all(not c.memory.expired() for c in kept)
    del values
    assert all(c.memory.expired() for c in kept)
    assert not any(c.is_of(torch.zeros(2)) for c in kept), "another tensor may lie at the address"
    others = values_of(region)
    call(others)
    assert not any(c.memory.expired() for c in call._copies._kept.values()) and len(call._copies._kept) == 2


def test_the_option_is_a_bool() -> None:
    assert parse({"constant_weights": True}).constant_weights
    with pytest.raises(OptionError, match="constant_weights"):
        parse({"constant_weights": 1})

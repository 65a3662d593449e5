"""Weights that lie transposed: what copying them is predicted to take, and copies that are made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from programs import chain
from real_blocks import Gpt2Block
from shared_tiles import Ffn

from tilestream import cuda, devices
from tilestream.apps.layers import Layer
from tilestream.errors import OptionError, VerifyError
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.kernels.families import why_no_kernel
from tilestream.kernels.product.shared_tile import Tail
from tilestream.options import Options, parse
from tilestream.plan import few_rows, planner
from tilestream.plan.candidates import FALLBACK
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.turned import NONE, lying, reads_them, turned
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


@pytest.mark.parametrize("rows", [16, 1024])
def test_plans_of_turned_weights_are_others(rows: int) -> None:
    """On many rows as well: a plan that reads them as they lie would serve a layer of another model, whose do not."""
    region = region_of(48, 520, rows)
    given = (region.program, rows, H200, Options())
    asked = planner.question(*given, turned(region, Options())), planner.question(*given)
    assert asked[0].key(measured=True) != asked[1].key(measured=True)


def test_layers_read_weights_as_they_lie_where_copies_would_take_longer() -> None:
    """GPT-2's on 1,024 rows: the sum of the layer's input and the block behind it."""
    torch.compiler.reset()
    x = torch.randn(1024, 768, device="meta", dtype=torch.bfloat16)
    with torch.no_grad():
        (graph,) = capture(Gpt2Block(768, 3072).bfloat16().eval().to("meta"), (x,)).graphs
    regions = partition(graph, projections=True, pays=lambda _: False).regions
    assert len(regions) == 2
    for region in regions:
        lying_so = turned(region, Options())
        assert lying_so.as_they_lie and lying_so.us > 30
        made = planner.proposals(region.program, 1024, H200, Options(), lying_so)
        best = {
            reads: min(c.predicted_us or 1e9 for c in made if c.pipeline is not None and reads_them(c) is reads)
            for reads in (True, False)
        }
        assert best[True] + 5 < best[False]
        (one, *_) = [c for c in made if reads_them(c)]
        assert one.pipeline is not None and one.detail.endswith("weights as they lie")
        assert {t.name for t in one.pipeline.tensors if t.by_columns} == set(lying_so.weights)
        assert pipeline_from_json(pipeline_to_json(one.pipeline)) == one.pipeline


def test_weights_that_bulk_copies_cannot_address_are_copied() -> None:
    found = turned(region_of(48, 522, 16), Options())
    assert found.weights and not found.as_they_lie


def test_kernels_of_other_families_refuse_weights_by_columns() -> None:
    program = chain(2, 64)
    weights = [t.name for t in program.tensors if t.role is Role.PARAMETER and len(t.shape) == 2]
    refused = planner.plan(program, 4096, H200, Options(strategy="vertical", measure=False)).chosen.pipeline
    assert refused is not None and why_no_kernel(refused) == ""
    assert "lies by columns" in why_no_kernel(lying(refused, weights))
    with pytest.raises(VerifyError, match="lies by columns"):
        cuda.sources(lying(refused, weights))
    two = share_tile(lying(Ffn(512, 128, 128).program(), ["up", "down"]), Split(2, 2))
    assert "has two layers, and weights that lie by columns" in why_no_kernel(two)
    some = lying(Layer(64, (640, 640)).program(), ["w0"])
    with pytest.raises(VerifyError, match="some of its weights lie by columns"):
        share_tile(some, Split(1, 8, Tail.NONE))


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

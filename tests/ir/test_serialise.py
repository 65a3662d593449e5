"""JSON of pipelines: an exact round trip, and refusal of everything else. Text of pipelines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from programs import Program, chain
from strategies import pipelines

from tilestream import devices
from tilestream.errors import CacheError
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.ir.text import show
from tilestream.options import Options
from tilestream.plan.planner import plan


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_round_trip_is_exact(p):
    data = json.loads(json.dumps(pipeline_to_json(p), allow_nan=False))
    back = pipeline_from_json(data)
    assert back == p and repr(back) == repr(p)


def test_rare_properties_of_a_stage_survive_and_are_shown():
    p = chain(2)
    rare = p.with_stages((p.stages[0].with_(replicas=2, group=2, in_flight=1),))
    assert pipeline_from_json(json.loads(json.dumps(pipeline_to_json(rare)))) == rare
    assert "streamed, in pairs, one product in flight" in show(rare)


@pytest.mark.parametrize("scalar", [float("inf"), float("-inf"), 1, 1.0, 0.1, -0.0, 1e-45])
def test_attributes_keep_value_and_type(scalar):
    p = Program("attr")
    p.store(p.op("maximum", 8, p.load("x", 8), scalar=scalar))
    program = p.build()
    text = json.dumps(pipeline_to_json(program), allow_nan=False)
    assert repr(pipeline_from_json(json.loads(text))) == repr(program)


def test_nan_survives():
    p = Program("nan")
    p.store(p.op("add", 8, p.load("x", 8), scalar=float("nan")))
    back = pipeline_from_json(json.loads(json.dumps(pipeline_to_json(p.build()), allow_nan=False)))
    assert str(back.stages[0].ops[1].attr("scalar")) == "nan"


@pytest.mark.parametrize("spoil", ["format", "stages", "tensors", "dtype", "reference", "list"])
def test_anything_else_is_refused(spoil):
    data = pipeline_to_json(chain(2))
    if spoil == "format":
        data["format"] = 0
    elif spoil == "dtype":
        data["stages"][0]["ops"][0]["out"][2] = "int8"
    elif spoil == "reference":
        data["stages"][0]["ops"][1]["tiles"] = ["nobody"]
    elif spoil == "list":
        data = []
    else:
        del data[spoil]
    with pytest.raises(CacheError):
        pipeline_from_json(data)


def test_text_tells_pipelines_apart():
    spatial = plan(chain(4), 65_536, devices.get("h200"), Options(strategy="spatial")).chosen.pipeline
    assert spatial is not None
    text = show(spatial)
    assert "stage s0:" in text and "l2, " in text and "input x [rows, 256] bf16" in text
    changed = [
        replace(spatial, strategy="other"),
        spatial.with_stages(spatial.stages, tuple(replace(q, depth=q.depth + 2) for q in spatial.queues)),
        spatial.with_stages(tuple(s.with_(replicas=s.replicas + 1) for s in spatial.stages)),
    ]
    assert len({text, *map(show, changed)}) == 4

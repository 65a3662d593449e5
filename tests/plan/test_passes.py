"""Passes: each keeps the meaning of the program and does what its name says; golden text of a few programs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from places import GOLDEN
from programs import Program, chain, edge_block, elementwise, nerf
from splits import H200, SPLITS, after_split
from strategies import programs, tensors_for

from tilestream import reference
from tilestream.errors import TilestreamError, VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Residency, Shard, Transport
from tilestream.ir.text import show
from tilestream.kernels.fits import verify_on
from tilestream.plan.passes.cleaning import merge_common_ops, order_memory_ops, remove_dead_ops
from tilestream.plan.passes.cuts import cut_vertical, split_bulk, split_spatial
from tilestream.plan.passes.settings import balance, choose_placement, choose_residency, set_queue_depth

SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


def kinds(p: Pipeline) -> list[list[str]]:
    return [[op.kind for op in stage.ops] for stage in p.stages]


def outputs(p: Pipeline, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return reference.run(p, tensors_for(p, rows, seed), precision="float64")


def same_meaning(a: Pipeline, b: Pipeline, rows: int = 130) -> None:
    want, got = outputs(a, rows), outputs(b, rows)
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("make", [chain, nerf, edge_block, partial(edge_block, 512, 2, "silu"), elementwise])
@pytest.mark.parametrize("split", ["bulk", "vertical"])
def test_golden(make, split):
    program = make()
    text = show(after_split(SPLITS[split](order_memory_ops(program), device=H200)))
    _compare(f"{program.name}.{split}", text)


@pytest.mark.parametrize("make", [chain, nerf, edge_block, partial(edge_block, 512, 2, "silu")])
def test_golden_spatial(make):
    program = make()
    _compare(f"{program.name}.spatial", show(after_split(split_spatial(order_memory_ops(program), H200))))


def _compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    assert path.exists(), f"no golden file {path}: write it with python tests/lib/golden.py"
    assert text == path.read_text(), f"{name} changed; if that is meant, python tests/lib/golden.py"


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(programs(), st.sampled_from(sorted(SPLITS)), st.sampled_from((1, 64, 130)))
def test_every_pass_keeps_the_meaning_and_the_last_is_legal(program, split, rows):
    want = outputs(program, rows)
    try:
        p = SPLITS[split](program, device=H200)
        final = after_split(p)
        verify_on(final, H200)
    except VerifyError:
        assume(False)
        return
    for made in (remove_dead_ops(program), merge_common_ops(program), order_memory_ops(program), final):
        got = outputs(made, rows)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(programs())
def test_clean_passes_are_idempotent(program):
    for one in (remove_dead_ops, merge_common_ops, order_memory_ops):
        once = one(program)
        assert one(once) == once


def test_dead_ops_go_and_tensors_stay():
    p = Program("dead")
    x = p.load("x", 32)
    p.op("sin", 32, p.linear(x, 32))
    p.store(p.op("relu", 32, x))
    made = remove_dead_ops(p.build())
    assert kinds(made) == [["load", "relu", "store"]]
    assert made.tensors == p.build().tensors


def test_equal_ops_are_computed_once():
    p = Program("twice")
    x = p.load("x", 32)
    p.store(p.op("add", 32, p.op("exp", 32, x), p.op("exp", 32, x)))
    p.store(p.op("mul", 32, p.op("exp", 32, x), scalar=2.0))
    p.store(p.op("mul", 32, p.op("exp", 32, x), scalar=2))
    made = merge_common_ops(p.build())
    assert kinds(made)[0].count("exp") == 1
    same_meaning(p.build(), made)


def test_memory_ops_move_to_their_uses():
    p = Program("order")
    x, y = p.load("x", 32), p.load("y", 32)
    h = p.op("relu", 32, x)
    g = p.op("add", 32, h, y)
    p.store(g)
    p.store(h)
    assert kinds(order_memory_ops(p.build())) == [["load", "relu", "store", "load", "add", "store"]]


def test_bulk_gives_each_linear_a_kernel_with_its_epilogue():
    p = after_split(split_bulk(edge_block(), H200))
    assert kinds(p) == [
        ["load", "load", "load", "cat"],
        ["linear", "relu"],
        ["linear", "relu"],
        ["linear"],
        ["layer_norm", "load", "add", "store"],
    ]
    assert {q.transport for q in p.queues} == {Transport.DRAM}
    assert [len(launch.stages) for launch in cut_at_dram(p)] == [1] * 5
    same_meaning(edge_block(), p)


def test_bulk_folds_a_concatenation_that_is_too_wide_into_the_linear(monkeypatch):
    module = import_module("tilestream.plan.passes.cuts")
    monkeypatch.setattr(module, "narrowest", lambda alone, device: (Shard(1), "too wide"))
    assert kinds(split_bulk(edge_block(), H200))[0] == ["load", "load", "load", "cat", "linear", "relu"]


def test_vertical_keeps_a_chain_in_one_stage():
    p = cut_vertical(nerf(), H200)
    assert len(p.stages) == 1 and not p.queues


def test_vertical_is_cut_where_the_fewest_bytes_cross(monkeypatch):
    p = Program("bottle")
    h = p.load("x", 480)
    for width in (480, 24, 480, 480):
        h = p.linear(h, width, "relu")
    p.store(h)
    program = p.build()
    monkeypatch.setattr(
        import_module("tilestream.plan.passes.cuts"),
        "_reason",
        lambda b, start, stop, device, form: "big" if sum(op.kind == "linear" for op in b.ops[start:stop]) > 2 else "",
    )
    made = cut_vertical(program, H200)
    assert [made.tiles()[q.tile].features for q in made.queues] == [24]
    assert [q.transport for q in made.queues] == [Transport.DRAM]
    same_meaning(program, made)


def test_vertical_is_cut_beside_a_cast_where_dtypes_must_not_mix(monkeypatch):
    p = Program("autocast")
    x = p.op("cast", 64, p.op("sin", 64, p.load("x", 64, dtype="f32"), dtype="f32"))
    p.store(p.linear(p.linear(x, 64, "relu"), 64))
    program = p.build()

    def one_dtype(b, start, stop, device, form):
        return "mixes" if {op.kind for op in b.ops[start:stop]} >= {"sin", "linear"} else ""

    monkeypatch.setattr(import_module("tilestream.plan.passes.cuts"), "_reason", one_dtype)
    made = cut_vertical(program, H200)
    assert kinds(made)[0] == ["load", "sin", "cast"]  # the narrower side: bf16 crosses, not f32
    assert len(made.stages) == 2
    same_meaning(program, made)


def test_vertical_says_why_nothing_fits():
    with pytest.raises(VerifyError, match="1024 features > 512"):
        cut_vertical(chain(2, 1024), H200)


def test_spatial_cuts_behind_the_epilogue_and_before_the_wide_cat():
    p = split_spatial(nerf(), H200)
    widths = {q.tile: p.tiles()[q.tile].features for q in p.queues}
    assert 319 not in widths.values() and 283 not in widths.values()
    loads = [op.params[0] for stage in p.stages for op in stage.ops if op.kind == "load"]
    assert loads.count("points") == 2  # read again where the skip joins, not queued
    assert not any(tile.startswith("load") for tile in widths)


def test_spatial_multicasts_and_skips():
    p = Program("fan")
    x = p.load("x", 128)
    h = p.linear(x, 128, "relu")
    g = p.linear(h, 128, "relu")
    k = p.linear(p.op("add", 128, g, h), 128, "relu")
    p.store(p.op("add", 128, k, h))
    program = p.build()
    made = after_split(split_spatial(program, H200))
    assert len(made.stages) == 3
    queues = {q.tile: q for q in made.queues}
    fan = next(q for q in made.queues if len(q.consumers) == 2)
    near = queues[next(t for t in queues if t != fan.tile)]
    assert fan.depth >= 2 * near.depth  # it skips a stage
    verify_on(made, H200)
    same_meaning(program, made)


def test_spatial_joins_small_layers():
    p = Program("small")
    h = p.load("x", 256)
    for width in (256, 256, 8, 8, 256):
        h = p.linear(h, width, "relu")
    p.store(h)
    assert len(split_spatial(p.build(), H200).stages) < 5


def test_layers_per_stage_is_the_hybrid_knob():
    counts = [len(split_spatial(chain(8), H200, layers).stages) for layers in (1, 2, 4)]
    assert counts == [8, 4, 2]
    with pytest.raises(VerifyError, match="one stage"):
        split_spatial(chain(8), H200, 8)


def test_spatial_has_nothing_to_split_in_one_linear():
    with pytest.raises(VerifyError, match="fewer than two linears"):
        split_spatial(chain(1), H200)


def test_wide_tiles_are_shared_by_columns():
    assert [s.placement.dim for s in choose_placement(edge_block(512, 2, "silu"), H200).stages] == [1]
    assert [s.placement.dim for s in choose_placement(edge_block(), H200).stages] == [0]


def test_weights_are_resident_where_they_fit():
    one = choose_residency(choose_placement(split_spatial(chain(8), H200), H200), H200)
    assert {s.residency for s in one.stages} == {Residency.RESIDENT}
    eight = choose_residency(choose_placement(chain(8), H200), H200)
    assert eight.stages[0].residency is Residency.STREAMED
    assert choose_residency(choose_placement(elementwise(), H200), H200).stages[0].residency is Residency.STREAMED


def test_balance_leaves_no_sm_idle_and_gives_work_its_share():
    p = Program("uneven")
    h = p.load("x", 256)
    for width in (256, 128, 256):
        h = p.linear(h, width, "relu")
    p.store(h)
    made = balance(split_spatial(p.build(), H200), H200)
    replicas = [s.replicas for s in made.stages]
    assert sum(replicas) == H200.sms
    assert replicas[0] > replicas[1]


@pytest.mark.parametrize("sms", [8, 9, 20, 132])
def test_balance_is_optimal(sms):
    """Against the closed form: the best bottleneck over all whole splits, by bisection."""
    from tilestream.kernels.stream.stage_cost import stage_cost

    device = H200.with_sms(sms)
    p = choose_residency(choose_placement(split_spatial(nerf(), device), device), device)
    if len(p.stages) > sms:
        with pytest.raises(VerifyError, match=f"stages > {sms} SMs"):
            balance(p, device)
        return
    made = balance(p, device)
    rate = {}
    for s in p.stages:
        cost = stage_cost(s, p, device)
        rate[s.name] = s.tiles_per_step / cost.step_s
    got = min(s.replicas * rate[s.name] for s in made.stages)
    low, high = 0.0, max(rate.values()) * sms
    for _ in range(60):
        middle = (low + high) / 2
        need = sum(max(1, -int(-middle // rate[s.name])) for s in p.stages)
        low, high = (middle, high) if need <= sms else (low, middle)
    assert got == pytest.approx(low, rel=1e-6)


def test_balance_where_memory_is_the_limit_still_shares_fairly():
    slow_memory = replace(H200, dram_bytes_per_s=1e11)
    p = split_spatial(chain(4), slow_memory)
    replicas = [s.replicas for s in balance(p, slow_memory).stages]
    assert max(replicas) - min(replicas) < 12


def test_more_stages_than_sms_are_refused():
    with pytest.raises(VerifyError, match="8 stages > 4 SMs"):
        balance(split_spatial(chain(8), H200), H200.with_sms(4))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_queue_depth_is_even_and_holds_a_step_of_all_replicas(steps):
    p = balance(split_spatial(nerf(), H200), H200)
    for q in set_queue_depth(p, steps).queues:
        least = max(p.stage(n).tiles_per_step * p.stage(n).replicas for n in (q.producer, *q.consumers))
        assert q.depth % 2 == 0 and q.depth >= steps * least


def test_queue_depth_can_be_given():
    p = balance(split_spatial(chain(3), H200), H200)
    assert {q.depth for q in set_queue_depth(p, depth=264).queues} == {264}


def test_splitting_needs_a_program():
    with pytest.raises(TilestreamError, match="2 stages"):
        split_bulk(split_spatial(chain(2), H200), H200)

"""Layers spread over SMs by columns: the pass, what its stages compute, what the verifier and the planner say of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from programs import Program, chain, edge_block
from random_pipelines import tensors_for

from tilestream import cuda, reference
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.ir.sizes import weight_bytes
from tilestream.ir.tileops import FIRST
from tilestream.ir.traffic import traffic
from tilestream.ir.verify import verify
from tilestream.kernels.fits import verify_on
from tilestream.options import Options
from tilestream.plan.candidates import Candidate
from tilestream.plan.passes.cuts import split_columns
from tilestream.plan.passes.settings import balance, choose_placement, choose_residency, set_queue_depth
from tilestream.plan.passes.verified import apply
from tilestream.plan.planner import plan, proposals
from tilestream.reference.whole import run_whole

H200 = get("h200")
FORCED = Options(strategy="spatial")


def by_columns(program: Pipeline, columns: int, dims: tuple[int, ...] = (1,)) -> Pipeline:
    """The stages as the planner makes them, on an H200."""
    passes = (
        partial(split_columns, device=H200, columns=columns),
        partial(choose_placement, device=H200, dims=dims),
        partial(choose_residency, device=H200),
        partial(balance, device=H200),
        set_queue_depth,
    )
    made = apply(passes, program)
    verify_on(made, H200)
    return made


def residual() -> Pipeline:
    """Parts meet parts of an input and of another layer, and an output is narrower than a part."""
    p = Program("residual")
    x = p.load("x", 192)
    a = p.linear(x, 192, "relu")
    b = p.op("add", 192, p.linear(a, 192, "tanh"), x)
    c = p.op("add", 192, p.linear(b, 192), a)
    p.store(p.linear(c, 40))
    return p.build()


@pytest.mark.parametrize("program", [chain(3, 192), residual(), edge_block(128)], ids=lambda p: p.name)
@pytest.mark.parametrize("columns", [64, 128])
def test_values_are_those_of_one_stage(program, columns):
    made = by_columns(program, columns) if program.name != "edge128" or columns < 128 else None
    if made is None:
        with pytest.raises(VerifyError, match="no layer is wider than 128 columns"):
            by_columns(program, columns)
        return
    tensors = tensors_for(program, 150, seed=2)
    want = reference.run(program, tensors)
    for found in (reference.run(made, tensors), run_whole(made, tensors)):
        for name, value in want.items():
            error = (found[name].double() - value.double()).norm() / value.double().norm()
            assert error < 4e-3, (name, float(error))


def test_chains_round_where_they_did():
    tensors = tensors_for(chain(3, 192), 150, seed=2)
    found, want = (reference.run(p, tensors) for p in (by_columns(chain(3, 192), 64), chain(3, 192)))
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_every_part_keeps_its_own_weights_and_reads_the_whole_operand():
    program = chain(4, 512)
    made = by_columns(program, 128)
    assert len(made.stages) == 16 and all(s.residency is Residency.RESIDENT for s in made.stages)
    assert {weight_bytes(s, made) for s in made.stages} == {128 * 512 * 2}
    assert {len(q.consumers) for q in made.queues} == {4}
    # Of 64 rows every queue takes 128 columns, written once and read by four; the input is loaded by four stages.
    rings = 12 * 64 * 256 * (1 + 4)
    again = 3 * 64 * 1024
    whole = traffic(program, 64)
    weights = sum((s.replicas - 1) * 128 * 512 * 2 for s in made.stages)
    assert traffic(made, 64).l2 == whole.dram + rings + again + weights


def test_parts_share_their_code():
    (source,) = cuda.sources(by_columns(chain(8, 256), 64))
    assert source.text.count("struct Kind") == 2  # the first layer loads, all others join queues
    assert len(source.tables.stages) == 32


def test_norms_keep_their_layer_whole():
    made = by_columns(edge_block(256), 128)
    assert [sum(op.kind == "linear" for op in s.ops) for s in made.stages] == [1] * len(made.stages)
    last = made.stages[-1]
    assert any(op.kind == "layer_norm" for op in last.ops)
    assert not any(op.attr(FIRST) is not None for op in last.ops)


@pytest.mark.parametrize(
    ("stage", "first", "problem"),
    [(-1, 64, "columns 64 to 128 .* stored twice"), (-3, 64, "columns 0 to 64 .* nobody")],
)
def test_an_output_has_each_column_once(stage, first, problem):
    made = split_columns(chain(2, 192), H200, columns=64)
    last = made.stages[stage]
    moved = replace(last, ops=(*last.ops[:-1], replace(last.ops[-1], attrs=((FIRST, first),))))
    with pytest.raises(VerifyError, match=problem):
        verify(made.with_stages(tuple(moved if s is last else s for s in made.stages)))


def test_a_part_beyond_the_layer_is_refused():
    made = split_columns(chain(2, 192), H200, columns=64)
    first = made.stages[2]
    ops = tuple(replace(op, attrs=((FIRST, 160),)) if op.kind == "linear" else op for op in first.ops)
    with pytest.raises(VerifyError, match=r"columns 160 to 160 \+ 64 of weight .* which has 192"):
        verify(made.with_stages(tuple(replace(s, ops=ops) if s is first else s for s in made.stages)))


def test_more_stages_than_sms_are_refused():
    with pytest.raises(VerifyError, match="layers by 64 columns are 136 stages > 132 SMs of h200"):
        split_columns(chain(17, 512), H200, columns=64)


def test_only_who_asks_for_spatial_gets_it():
    """No GPU has found it faster than Inductor."""
    program = chain(8, 512)
    assert not any(_by_columns(c) for c in proposals(program, 512, H200, Options()))
    assert any(_by_columns(c) and c.pipeline is not None for c in proposals(program, 512, H200, FORCED))


def test_of_spatial_pipelines_it_is_chosen_for_few_rows_of_wide_layers():
    assert _by_columns(plan(chain(8, 512), 512, H200, FORCED).chosen)
    assert not _by_columns(plan(chain(8, 512), 65_536, H200, FORCED).chosen)


def _by_columns(c: Candidate) -> bool:
    return c.strategy == "spatial" and c.detail.startswith("layers by")

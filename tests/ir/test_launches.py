"""The cut at DRAM queues: groups, their order, and the tensors between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from random_programs import Limits
from strategies import pipelines, row_counts, tensors_for

from tilestream import reference
from tilestream.errors import IRError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Queue, Role, Stage, Tensor, Tile, TileOp, Transport
from tilestream.ir.verify import verify

X = Tensor.of("x", Role.INPUT, (4,), "bf16")
Y = Tensor.of("y", Role.OUTPUT, (4,), "f16")


def tile(name: str) -> Tile:
    return Tile.of(name, 4, "f16")


def far(name: str, producer: str, *consumers: str) -> Queue:
    return Queue(name, producer, consumers, Transport.DRAM, 0, f"net.py:{name}")


def four_stages(*queues: Queue) -> Pipeline:
    """a -> b -> c -> d, listed in the wrong order."""
    a = Stage.of("a", (TileOp("load", Tile.of("t", 4, "bf16"), (), ("x",)), TileOp("relu", tile("u"), ("t",))))
    b = Stage.of("b", (TileOp("exp", tile("v"), ("u",)),))
    c = Stage.of("c", (TileOp("neg", tile("w"), ("v",)),))
    d = Stage.of("d", (TileOp("abs", tile("r"), ("w",)), TileOp("store", None, ("r",), ("y",))))
    return Pipeline("p", (X, Y), (d, c, b, a), queues)


def test_without_dram_queues_it_is_one_launch():
    p = four_stages(Queue("u", "a", ("b",)), Queue("v", "b", ("c",)), Queue("w", "c", ("d",)))
    assert cut_at_dram(p) == (p,)


def test_stages_joined_on_chip_stay_together_and_launches_are_ordered():
    p = four_stages(Queue("u", "a", ("b",)), far("v", "b", "c"), Queue("w", "c", ("d",)))
    first, second = cut_at_dram(p)
    assert ({s.name for s in first.stages}, {s.name for s in second.stages}) == ({"a", "b"}, {"c", "d"})
    assert [q.tile for q in first.queues] == ["u"] and [q.tile for q in second.queues] == ["w"]


def test_a_tile_that_crosses_becomes_an_output_and_then_an_input():
    p = four_stages(Queue("u", "a", ("b",)), far("v", "b", "c"), Queue("w", "c", ("d",)))
    first, second = cut_at_dram(p)
    assert first.by_role(Role.OUTPUT) == (Tensor.of("v.dram", Role.OUTPUT, (4,), "f16"),)
    assert first.by_role(Role.INPUT) == (X,)
    assert second.by_role(Role.INPUT) == (Tensor.of("v.dram", Role.INPUT, (4,), "f16"),)
    assert second.by_role(Role.OUTPUT) == (Y,)
    stored = first.stage("b").ops[-1]
    assert (stored.kind, stored.ins, stored.params, stored.source) == ("store", ("v",), ("v.dram",), "net.py:v")
    for launch in (first, second):
        verify(launch)


def test_bulk_is_a_launch_a_stage():
    p = four_stages(far("u", "a", "b"), far("v", "b", "c"), far("w", "c", "d"))
    assert [[s.name for s in launch.stages] for launch in cut_at_dram(p)] == [["a"], ["b"], ["c"], ["d"]]


def test_a_tile_may_go_to_a_neighbour_and_to_a_later_launch():
    p = four_stages(Queue("u", "a", ("b",)), far("v", "b", "c"), Queue("w", "c", ("d",)))
    d = Stage.of("d", (TileOp("add", tile("r"), ("w", "u")), TileOp("store", None, ("r",), ("y",))))
    both = p.with_stages((d, *p.stages[1:]), (*p.queues, far("u", "a", "d")))
    verify(both)
    first, second = cut_at_dram(both)
    assert {t.name for t in first.by_role(Role.OUTPUT)} == {"u.dram", "v.dram"}
    x = torch.randn(70, 4).bfloat16()
    u = x.float().relu().half()
    v = u.float().exp().half()
    want = (-v.float()).half().float() + u.float()
    assert torch.equal(reference.run(both, {"x": x})["y"], want.half())


def test_launches_in_a_cycle():
    p = four_stages(Queue("u", "a", ("b",)), far("v", "b", "c"), Queue("w", "c", ("d",)))
    a, b, c, d = p.stage("a"), p.stage("b"), p.stage("c"), p.stage("d")
    b = replace(b, ops=(*b.ops, TileOp("add", tile("z"), ("v", "r"))))
    looped = p.with_stages((a, b, c, d), (*p.queues, far("r", "d", "b"), Queue("z", "b", ("d",))))
    with pytest.raises(IRError, match="the DRAM queues of pipeline 'p' form a cycle"):
        cut_at_dram(looped)


@settings(max_examples=60, deadline=None)
@given(pipelines(Limits(max_width=48)), row_counts(300))
def test_running_the_launches_by_hand_gives_the_same(p: Pipeline, rows: int):
    tensors = tensors_for(p, rows)
    want = reference.run(p, tensors)
    memory = dict(tensors)
    for launch in cut_at_dram(p):
        verify(launch)
        names = [t.name for t in launch.tensors if t.role is not Role.OUTPUT]
        memory |= reference.run(launch, {n: memory[n] for n in names})
    for name, value in want.items():
        assert torch.equal(memory[name], value)


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_every_stage_is_launched_once_and_after_what_it_reads(p: Pipeline):
    launches = cut_at_dram(p)
    assert sorted(s.name for launch in launches for s in launch.stages) == sorted(s.name for s in p.stages)
    written = {t.name for t in p.by_role(Role.INPUT)}
    for launch in launches:
        assert {t.name for t in launch.by_role(Role.INPUT)} <= written
        written |= {t.name for t in launch.by_role(Role.OUTPUT)}
    assert {t.name for t in p.by_role(Role.OUTPUT)} <= written

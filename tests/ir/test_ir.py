"""The IR: names, single assignment, and what stages and pipelines say of themselves."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from strategies import pipelines

from tilestream.errors import IRError
from tilestream.ir.pipeline import Pipeline, Queue, Role, Shard, Stage, Tensor, Tile, TileOp

X = Tensor.of("x", Role.INPUT, (4,), "bf16")
Y = Tensor.of("y", Role.OUTPUT, (4,), "bf16")
W = Tensor.of("w", Role.PARAMETER, (4, 4), "bf16")
T = Tile.of("t", 4, "bf16")
U = Tile.of("u", 4, "bf16")
LOAD = TileOp("load", T, (), ("x",), (), "net.py:1")
RELU = TileOp("relu", U, ("t",), (), (), "net.py:2")
STORE = TileOp("store", None, ("u",), ("y",), (), "net.py:3")


def made(*ops: TileOp, queues: tuple[Queue, ...] = (), tensors: tuple[Tensor, ...] = (X, Y, W)) -> Pipeline:
    return Pipeline("p", tensors, (Stage.of("s", ops),), queues)


def refused(match: str, *ops: TileOp, **others) -> None:
    with pytest.raises(IRError, match=match):
        made(*ops, **others)


def test_a_pipeline_finds_its_parts():
    p = made(LOAD, RELU, STORE)
    assert p.tensor("w").features == 4 and p.stage("s").replicas == 1
    assert p.tiles() == {"t": T, "u": U} == p.stage("s").defined()
    assert p.by_role(Role.OUTPUT) == (Y,)
    with pytest.raises(IRError, match="pipeline 'p' has no tensor 'v'. Remedy: use one of: x, y, w"):
        p.tensor("v")
    with pytest.raises(IRError, match="has no stage 'r'.*use one of: s"):
        p.stage("r")


def test_everything_is_frozen():
    p = made(LOAD, RELU, STORE)
    with pytest.raises(FrozenInstanceError):
        p.name = "q"  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(p) == hash(made(LOAD, RELU, STORE))


def test_sizes():
    assert T.row_bytes == 4 * 2 and Tile.of("t", 3, "f32").row_bytes == 3 * 4
    assert Tensor.of("s", Role.PARAMETER, (), "f32").features == 1
    assert Stage.of("s", (), placement=Shard(0)).tiles_per_step == 2
    assert Stage.of("s", (), placement=Shard(1)).tiles_per_step == 1


def test_attributes_and_source_lines():
    op = replace(RELU, attrs=(("eps", 0.5),))
    assert op.attr("eps") == 0.5 and op.attr("beta", 2) == 2 and op.attr("beta") is None
    assert Stage.of("s", (replace(LOAD, source=""), RELU)).source == "net.py:2"


def test_what_a_stage_takes():
    s = Stage.of("s", (TileOp("add", U, ("a", "b")), TileOp("mul", T, ("u", "a"))))
    assert s.taken() == ("a", "b")


def test_names_are_unique():
    refused("two tensors of one name", LOAD, RELU, STORE, tensors=(X, X, Y))
    refused(r"tile 'u' is defined twice \(net.py:2\)", LOAD, RELU, RELU)
    refused("tile 'x' is defined twice", replace(LOAD, out=Tile.of("x", 4, "bf16")))
    with pytest.raises(IRError, match="two stages of one name"):
        Pipeline("p", (X,), (Stage.of("s", ()), Stage.of("s", ())))


def test_every_name_is_defined_before_it_is_used():
    refused("relu at net.py:2 uses tile 't', which stage 's' does not have. Remedy: define it", RELU, LOAD)
    refused("load at net.py:1 uses tensor 'x', which the pipeline does not have", LOAD, RELU, tensors=(Y,))
    with pytest.raises(IRError, match=r"Remedy: add Queue\('t', producer='s', consumers=\('r',\)\)"):
        Pipeline("p", (X, Y), (Stage.of("s", (LOAD,)), Stage.of("r", (RELU, STORE))))
    joined = Pipeline("p", (X, Y), (Stage.of("s", (LOAD,)), Stage.of("r", (RELU, STORE))), (Queue("t", "s", ("r",)),))
    assert joined.stage("r").taken() == ("t",)


def test_queues_name_the_stage_that_makes_the_tile():
    refused("queue of 'u': stage 's' does not define that tile", LOAD, queues=(Queue("u", "s", ("s",)),))
    refused("has no stage 'r'", LOAD, RELU, queues=(Queue("u", "s", ("r",)),))


def test_signatures():
    refused("unknown tile op 'mish' at net.py:2.*use one of: abs, add", LOAD, replace(RELU, kind="mish"))
    refused("relu at net.py:2 takes 1 tiles, got 2", LOAD, replace(RELU, tiles=("t", "t")))
    refused("linear at net.py:2 takes 1 to 2 tensors, got 0", LOAD, replace(RELU, kind="linear"))
    refused("relu at net.py:2 has no attribute 'beta'.*it has: none", LOAD, replace(RELU, attrs=(("beta", 1.0),)))
    refused("add at net.py:2 needs exactly two operands", LOAD, replace(RELU, kind="add"))
    refused(
        "add at net.py:2 needs exactly", LOAD, replace(RELU, kind="add", tiles=("t", "t"), attrs=(("scalar", 1.0),))
    )
    refused("only a store has no result", LOAD, replace(RELU, out=None))
    refused("only a store has no result", LOAD, RELU, replace(STORE, out=Tile.of("z", 4, "bf16")))


def test_tiles_have_features_and_a_known_dtype():
    refused("makes a tile of 0 features", LOAD, replace(RELU, out=Tile.of("u", 0, "bf16")))
    refused("tile 'u' has dtype 'f64'.*bf16, f16, f32", LOAD, replace(RELU, out=Tile.of("u", 4, "f64")))


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_single_assignment_and_delivery(p: Pipeline):
    """Every tile has one maker, and a stage takes exactly what queues bring it."""
    assert sum(len(s.defined()) for s in p.stages) == len(p.tiles())
    for stage in p.stages:
        assert set(stage.taken()) == {q.tile for q in p.queues if stage.name in q.consumers}

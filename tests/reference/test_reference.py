"""The reference machine: what ops mean, what rounding there is, and how queues behave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import Limits
from strategies import cuts, pipelines, random_pipeline, row_counts, tensors_for

from tilestream import reference
from tilestream.errors import InputError, PipelineDeadlock, VerifyError
from tilestream.ir.pipeline import Pipeline, Queue, Role, Shard, Stage, Tensor, Tile, TileOp, Transport
from tilestream.ir.tileops import OPS, PLAIN
from tilestream.ir.verify import verify

SMALL = Limits(max_width=48, ops=12)


def one_op(kind: str, widths: tuple[int, ...], out: int, params=(), attrs=(), dtype: str = "f32") -> Pipeline:
    """load each input, apply one op, store."""
    tensors = [Tensor.of(f"x{i}", Role.INPUT, (w,), dtype) for i, w in enumerate(widths)]
    tensors += [Tensor.of(f"p{i}", Role.PARAMETER, shape, dtype) for i, shape in enumerate(params)]
    tensors.append(Tensor.of("y", Role.OUTPUT, (out,), dtype))
    ops = [TileOp("load", Tile.of(f"a{i}", w, dtype), (), (f"x{i}",)) for i, w in enumerate(widths)]
    ins = tuple(f"a{i}" for i in range(len(widths)))
    ops.append(TileOp(kind, Tile.of("r", out, dtype), ins, tuple(f"p{i}" for i in range(len(params))), tuple(attrs)))
    ops.append(TileOp("store", None, ("r",), ("y",)))
    return Pipeline("one", tuple(tensors), (Stage.of("s", tuple(ops)),))


F = torch.nn.functional
MEANINGS = {
    "linear": ((5,), 3, ((3, 5), (3,)), (), lambda x, w, b: x @ w.T + b),
    "relu": ((5,), 5, (), (), lambda x: x.clamp(min=0)),
    "gelu": ((5,), 5, (), (), lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
    "gelu_tanh": ((5,), 5, (), (), lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    "silu": ((5,), 5, (), (), lambda x: x / (1 + torch.exp(-x))),
    "sigmoid": ((5,), 5, (), (), lambda x: 1 / (1 + torch.exp(-x))),
    "tanh": ((5,), 5, (), (), lambda x: 1 - 2 / (torch.exp(2 * x) + 1)),
    "softplus": (
        (5,),
        5,
        (),
        (("beta", 2.0), ("threshold", 1.5)),
        lambda x: torch.where(2 * x > 1.5, x, torch.log1p(torch.exp(2 * x)) / 2),
    ),
    "gelu_slope": (
        (5,),
        5,
        (),
        (),
        lambda x: 0.5 * (1 + torch.erf(x / 2**0.5)) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5,
    ),
    "exp": ((5,), 5, (), (), lambda x: torch.e**x),
    "expm1": ((5,), 5, (), (), lambda x: torch.sinh(x) + torch.cosh(x) - 1),
    "log": ((5,), 5, (), (), torch.log),
    "sin": ((5,), 5, (), (), torch.sin),
    "cos": ((5,), 5, (), (), torch.cos),
    "neg": ((5,), 5, (), (), lambda x: 0 - x),
    "abs": ((5,), 5, (), (), lambda x: torch.where(x < 0, -x, x)),
    "sqrt": ((5,), 5, (), (), lambda x: x**0.5),
    "rsqrt": ((5,), 5, (), (), lambda x: x**-0.5),
    "reciprocal": ((5,), 5, (), (), lambda x: 1 / x),
    "square": ((5,), 5, (), (), lambda x: x * x),
    "cast": ((5,), 5, (), (), lambda x: x),
    "add": ((5, 1), 5, (), (), lambda a, b: a + b),
    "sub": ((5,), 5, (), (("scalar", 2), ("reversed", 1)), lambda a: 2 - a),
    "mul": ((5,), 5, ((1,),), (), lambda a, v: a * v),
    "div": ((1,), 4, ((4,),), (("reversed", 1),), lambda a, v: v / a),
    "maximum": ((5, 5), 5, (), (), lambda a, b: torch.where(a > b, a, b)),
    "minimum": ((5,), 5, ((),), (), lambda a, v: torch.where(a < v, a, v.expand_as(a))),
    "relu_backward": ((5, 1), 5, (), (), lambda a, b: a * (b > 0)),
    "cat": ((5, 2, 1), 8, (), (), lambda *xs: torch.cat(xs, 1)),
    "slice": ((5,), 2, (), (("start", 1), ("stop", 3)), lambda x: x[:, 1:3]),
    "sum": ((5,), 1, (), (), lambda x: x.sum(1, keepdim=True)),
    "mean": ((5,), 1, (), (), lambda x: x.sum(1, keepdim=True) / 5),
    "max": ((5,), 1, (), (), lambda x: x.sort(1).values[:, -1:]),
    "max_rows": ((64,), 4, (), (), lambda x: torch.cat([g.amax(0).view(16, 4)[: len(g)] for g in x.split(16)])),
    "layer_norm": (
        (5,),
        5,
        ((5,),),
        (("eps", 1e-3), ("affine", "b")),
        lambda x, b: (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-3).sqrt() + b,
    ),
    "rms_norm": (
        (5,),
        5,
        ((5,),),
        (("eps", 1e-3),),
        lambda x, w: x / ((x * x).mean(1, keepdim=True) + 1e-3).sqrt() * w,
    ),
    "softmax": ((5,), 5, (), (), lambda x: torch.exp(x) / torch.exp(x).sum(1, keepdim=True)),
}


def test_every_op_has_a_meaning_here():
    assert set(MEANINGS) == set(OPS) - PLAIN - {"load", "store"}


@pytest.mark.parametrize("kind", MEANINGS)
def test_op_means(kind: str):
    widths, out, params, attrs, meaning = MEANINGS[kind]
    pipeline = one_op(kind, widths, out, params, attrs)
    verify(pipeline)
    tensors = tensors_for(pipeline, 70, 3)
    if kind in ("log", "sqrt", "rsqrt", "reciprocal", "div"):
        tensors["x0"] = tensors["x0"].abs() + 0.5
    got = reference.run(pipeline, tensors, precision="float64")["y"]
    want = meaning(*(t.double() for t in tensors.values()))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reference.run(pipeline, tensors)["y"], want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["maximum", "minimum", "max", "relu", "softmax", "layer_norm"])
def test_nan_propagates(kind: str):
    pipeline = one_op(kind, (3,), 1 if kind == "max" else 3, attrs=(("scalar", 0.0),) if "imum" in kind else ())
    x = torch.tensor([[1.0, float("nan"), 2.0]])
    assert reference.run(pipeline, {"x0": x})["y"].isnan().any()


def test_rounds_at_linear_inputs_queues_casts_and_stores_and_nowhere_else():
    x = torch.tensor([[1.0 + 2**-7]]).bfloat16()  # the square needs 14 more bits than bf16 has
    exact = x.double() ** 2
    rounded = exact.bfloat16().double()
    assert exact != rounded
    square = TileOp("square", Tile.of("q", 1, "bf16"), ("a",))
    load = TileOp("load", Tile.of("a", 1, "bf16"), (), ("x",))
    store = TileOp("store", None, ("r",), ("y",))
    ts = (
        Tensor.of("x", Role.INPUT, (1,), "bf16"),
        Tensor.of("y", Role.OUTPUT, (1,), "f32"),
        Tensor.of("w", Role.PARAMETER, (1, 1), "bf16"),
    )
    tensors = {"x": x, "w": torch.ones(1, 1).bfloat16()}
    neg = TileOp("neg", Tile.of("r", 1, "bf16"), ("q",))

    def result(*stages: Stage, queues=()) -> float:
        return -reference.run(Pipeline("p", ts, stages, queues), tensors)["y"].item()

    assert result(Stage.of("s", (load, square, neg, store))) == exact
    cast = (TileOp("cast", Tile.of("c", 1, "bf16"), ("q",)), replace(neg, tiles=("c",)))
    assert result(Stage.of("s", (load, square, *cast, store))) == rounded
    linear = (TileOp("linear", Tile.of("c", 1, "bf16"), ("q",), ("w",)), replace(neg, tiles=("c",)))
    assert result(Stage.of("s", (load, square, *linear, store))) == rounded
    two = (Stage.of("s", (load, square)), Stage.of("t", (neg, store)))
    assert result(*two, queues=(Queue("q", "s", ("t",)),)) == rounded
    assert result(*two, queues=(Queue("q", "s", ("t",), Transport.DRAM, 0),)) == rounded
    to_bf16 = (*ts[:1], replace(ts[1], dtype="bf16"), ts[2])
    stored = reference.run(Pipeline("p", to_bf16, (Stage.of("s", (load, square, neg, store)),)), tensors)["y"]
    assert stored.dtype == torch.bfloat16 and -stored.item() == rounded


def test_the_producer_keeps_its_unrounded_value():
    x = torch.tensor([[1.0 + 2**-7]]).bfloat16()
    ops = (
        TileOp("load", Tile.of("a", 1, "bf16"), (), ("x",)),
        TileOp("square", Tile.of("q", 1, "bf16"), ("a",)),
        TileOp("store", None, ("q",), ("y",)),
    )
    ts = (Tensor.of("x", Role.INPUT, (1,), "bf16"), *(Tensor.of(n, Role.OUTPUT, (1,), "f32") for n in "yz"))
    queues = (Queue("q", "s", ("t",)),)
    p = Pipeline("p", ts, (Stage.of("s", ops), Stage.of("t", (TileOp("store", None, ("q",), ("z",)),))), queues)
    got = reference.run(p, {"x": x})
    assert got["y"].double() == x.double() ** 2 != got["z"].double()


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 128, 129, 1000])
def test_any_number_of_rows(rows: int):
    pipeline = one_op("softmax", (7,), 7, dtype="bf16")
    tensors = tensors_for(pipeline, rows)
    got = reference.run(pipeline, tensors)["y"]
    assert got.shape == (rows, 7) and got.dtype == torch.bfloat16
    torch.testing.assert_close(got, torch.softmax(tensors["x0"].float(), 1).bfloat16(), rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(pipelines(SMALL), row_counts(300), st.integers(0, 9))
def test_a_row_does_not_depend_on_its_neighbours(pipeline: Pipeline, rows: int, seed: int):
    tensors = tensors_for(pipeline, rows, seed)
    whole = reference.run(pipeline, tensors)
    inputs = {t.name for t in pipeline.by_role(Role.INPUT)}
    first = reference.run(pipeline, {n: t[: rows // 2] if n in inputs else t for n, t in tensors.items()})
    for name, value in first.items():
        assert torch.equal(value, whole[name][: rows // 2])


@settings(max_examples=100, deadline=None)
@given(cuts(), row_counts(), st.integers(0, 9))
def test_stages_give_what_one_stage_gives(pair: tuple[Pipeline, Pipeline], rows: int, seed: int):
    one, several = pair
    tensors = tensors_for(one, rows, seed)
    want = reference.run(one, tensors, precision="float64")
    got = reference.run(several, tensors, precision="float64")
    for name in want:
        # torch's vector and scalar code differ in the last bit, and strides choose between them.
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(cuts(SMALL), row_counts(300), st.integers(0, 9))
def test_a_queue_is_a_cast_and_nothing_else(pair: tuple[Pipeline, Pipeline], rows: int, seed: int):
    _, several = pair
    tensors = tensors_for(several, rows, seed)
    want = reference.run(_merged(several), tensors)
    for name, value in reference.run(several, tensors).items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0, equal_nan=True)


def _merged(p: Pipeline) -> Pipeline:
    """All stages in one, with a cast where a queue was."""
    tiles, ops, left, done = p.tiles(), [], list(p.stages), set()
    while left:
        stage = next(s for s in left if done.issuperset(s.taken()))
        renamed = {name: f"{name}.cast" for name in stage.taken()}
        made = {op.out.name for op in ops if op.out is not None}
        for old, new in renamed.items():
            if new not in made:
                ops.append(TileOp("cast", replace(tiles[old], name=new), (old,)))
        ops += [replace(op, tiles=tuple(renamed.get(n, n) for n in op.ins)) for op in stage.ops]
        done |= set(stage.defined())
        left.remove(stage)
    return Pipeline("merged", p.tensors, (Stage.of("s", tuple(ops), placement=Shard(1)),))


@settings(max_examples=60, deadline=None)
@given(pipelines(SMALL), row_counts(300), st.data())
def test_depth_replicas_and_scheduling_order_change_no_bit(pipeline: Pipeline, rows: int, data: st.DataObject):
    stages = tuple(
        s.with_(replicas=data.draw(st.integers(1, 4)), placement=Shard(data.draw(st.integers(0, 1))))
        for s in data.draw(st.permutations(pipeline.stages))
    )
    steps = {s.name: s.replicas * s.tiles_per_step for s in stages}
    queues = tuple(
        replace(
            q, depth=-(-max(steps[s] for s in (q.producer, *q.consumers)) // 2) * 2 + 2 * data.draw(st.integers(0, 3))
        )
        if q.transport is Transport.L2
        else q
        for q in pipeline.queues
    )
    other = pipeline.with_stages(stages, tuple(queues))
    verify(other)
    tensors = tensors_for(pipeline, rows)
    want = reference.run(pipeline, tensors)
    for name, value in reference.run(other, tensors).items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(pipelines(SMALL), row_counts(300))
def test_observe_sees_every_tile_once_and_in_order(pipeline: Pipeline, rows: int):
    seen: dict[str, list[torch.Tensor]] = {}

    def observe(name: str, index: int, value: torch.Tensor) -> None:
        assert len(seen.setdefault(name, [])) == index
        seen[name].append(value.clone())

    tensors = tensors_for(pipeline, rows)
    single = pipeline.with_stages(tuple(s.with_(replicas=1) for s in pipeline.stages))
    outputs = reference.run(single, tensors, observe=observe)
    assert set(seen) == (set(pipeline.tiles()) if rows else set())
    for stage in pipeline.stages:
        for op in stage.ops:
            if op.kind == "store" and rows and op.ins[0] in stage.defined():
                stored = torch.cat(seen[op.ins[0]])
                assert torch.equal(stored.to(outputs[op.params[0]].dtype), outputs[op.params[0]])


# -- queues that deadlock


def skip(short: int, long: int, middle: int = 0, ends: int = 0) -> Pipeline:
    """first -> middle -> last, and a skip connection first -> last of depth ``short``."""
    ops = [
        (
            TileOp("load", Tile.of("a", 4, "bf16"), (), ("x",), (), "net.py:1"),
            TileOp("neg", Tile.of("n", 4, "bf16"), ("a",)),
        ),
        (TileOp("exp", Tile.of("e", 4, "bf16"), ("n",), (), (), "net.py:2"),),
        (TileOp("add", Tile.of("r", 4, "bf16"), ("e", "a"), (), (), "net.py:3"), TileOp("store", None, ("r",), ("y",))),
    ]
    placements = (Shard(ends), Shard(middle), Shard(ends))
    stages = tuple(Stage.of(n, o, 1, s) for n, o, s in zip(("first", "middle", "last"), ops, placements, strict=True))
    queues = (
        Queue("a", "first", ("last",), Transport.L2, short, "net.py:9"),
        Queue("n", "first", ("middle",), Transport.L2, long),
        Queue("e", "middle", ("last",), Transport.L2, long),
    )
    tensors = (Tensor.of("x", Role.INPUT, (4,), "bf16"), Tensor.of("y", Role.OUTPUT, (4,), "bf16"))
    return Pipeline("skip", tensors, stages, queues)


@pytest.mark.parametrize("short", [0, 1])
def test_a_skip_queue_shallower_than_a_step_deadlocks_and_is_rejected(short: int):
    pipeline = skip(short, 4)
    with pytest.raises(VerifyError, match=f"queue of 'a' .* depth {short} < 2 = 2 tiles a step x 1 replicas"):
        verify(pipeline)
    with pytest.raises(PipelineDeadlock) as caught:
        reference.run(pipeline, tensors_for(pipeline, 300))
    message = str(caught.value)
    assert "stage 'first' replica 0 (net.py:1) at tile 0 waits for room for tile" in message
    assert f"queue of 'a' 'first' -> 'last' (head 0, tail 0, depth {short}; net.py:9)" in message
    assert "stage 'middle' replica 0 (net.py:2) at tile 0 waits for tile 0" in message


def test_a_skip_queue_past_a_stage_of_two_tiles_a_step_needs_depth_two():
    """Each end of the skip takes one tile a step, yet depth 1 is not enough: why the verifier asks for even depths."""
    pipeline = skip(1, 4, middle=0, ends=1)
    with pytest.raises(VerifyError, match="depth 1, which is odd"):
        verify(pipeline)
    with pytest.raises(PipelineDeadlock, match=r"tile 1 in the queue of 'n' .*|room for tile 1 in the queue of 'a'"):
        reference.run(pipeline, tensors_for(pipeline, 300))
    legal = skip(2, 4, middle=0, ends=1)
    verify(legal)
    reference.run(legal, tensors_for(legal, 300))


@pytest.mark.parametrize("rows", [1, 65, 300])
def test_an_odd_tile_is_rounded_up_to_a_whole_step_of_the_launch(rows: int):
    """The last stage takes two tiles at once, the others one: without the extra tile it would wait for ever."""
    pipeline = skip(2, 2, middle=0, ends=1)
    tensors = tensors_for(pipeline, rows)
    want = torch.exp(-tensors["x"].float()).bfloat16().float() + tensors["x"].float()
    assert torch.equal(reference.run(pipeline, tensors)["y"], want.bfloat16())


def test_a_cycle_deadlocks_and_says_who_waits():
    a = Stage.of("a", (TileOp("relu", Tile.of("u", 4, "bf16"), ("v",), (), (), "net.py:1"),))
    b = Stage.of("b", (TileOp("neg", Tile.of("v", 4, "bf16"), ("u",)), TileOp("store", None, ("v",), ("y",))))
    tensors = (Tensor.of("x", Role.INPUT, (4,), "bf16"), Tensor.of("y", Role.OUTPUT, (4,), "bf16"))
    pipeline = Pipeline("loop", tensors, (a, b), (Queue("u", "a", ("b",)), Queue("v", "b", ("a",))))
    with pytest.raises(VerifyError, match="wait for each other: a -> b -> a"):
        verify(pipeline)
    with pytest.raises(PipelineDeadlock, match=r"after 0 steps: stage 'a' replica 0 \(net.py:1\) at tile 0 waits"):
        reference.run(pipeline, tensors_for(pipeline, 10))


@settings(max_examples=100, deadline=None)
@given(pipelines(SMALL), st.data(), row_counts(700))
def test_what_the_verifier_accepts_completes(pipeline: Pipeline, data: st.DataObject, rows: int):
    """Any depths, replicas and placements: either the verifier objects or the machine completes."""
    stages = tuple(
        s.with_(replicas=data.draw(st.integers(1, 3)), placement=Shard(data.draw(st.integers(0, 1))))
        for s in pipeline.stages
    )
    queues = tuple(
        replace(q, depth=data.draw(st.integers(0, 8))) if q.transport is Transport.L2 else q for q in pipeline.queues
    )
    changed = pipeline.with_stages(stages, queues)
    try:
        verify(changed)
    except VerifyError:
        return
    reference.run(changed, tensors_for(changed, rows))


# -- inputs


def test_bad_inputs_are_named():
    pipeline = one_op("linear", (5,), 3, ((3, 5),), dtype="bf16")
    good = tensors_for(pipeline, 10)

    def refused(match: str, **changes: Any) -> None:
        tensors = {n: t for n, t in (good | changes).items() if t is not None}
        with pytest.raises(InputError, match=match):
            reference.run(pipeline, tensors)

    refused("was not given 'p0'.*Remedy: pass every input and parameter: x0, p0", p0=None)
    refused("parameter 'p0' is a list", p0=[1.0])
    refused("does not take 'z'", z=torch.ones(1))
    refused("does not take 'y'", y=torch.ones(10, 3))
    refused(r"input 'x0' has shape \[10, 4\], the pipeline takes \[rows, 5\]", x0=torch.ones(10, 4).bfloat16())
    refused(r"input 'x0' has shape \[2, 5, 5\]", x0=torch.ones(2, 5, 5).bfloat16())
    refused(r"input 'x0' has shape \[\]", x0=torch.ones(()).bfloat16())
    refused(r"parameter 'p0' has shape \[5, 3\], the pipeline takes \[3, 5\]", p0=torch.ones(5, 3).bfloat16())
    refused(r"input 'x0' is torch.float32, the pipeline takes torch.bfloat16.*\.to\(", x0=torch.ones(10, 5))
    refused("on meta, the reference machine runs on the CPU", x0=torch.ones(10, 5, device="meta").bfloat16())


def test_inputs_of_different_lengths_are_refused():
    pipeline = one_op("add", (3, 3), 3, dtype="bf16")
    tensors = {"x0": torch.ones(4, 3).bfloat16(), "x1": torch.ones(5, 3).bfloat16()}
    with pytest.raises(InputError, match="input 'x1' has 5 rows, but 'x0' has 4"):
        reference.run(pipeline, tensors)


def test_the_oracle_takes_unrounded_tensors():
    pipeline = one_op("exp", (3,), 3, dtype="bf16")
    x = torch.rand(4, 3, dtype=torch.float64)
    got = reference.run(pipeline, {"x0": x}, precision="float64")["y"]
    assert torch.equal(got, torch.exp(x))
    with pytest.raises(InputError, match="torch.float64"):
        reference.run(pipeline, {"x0": x})


def test_inputs_are_left_alone_and_may_be_strided():
    pipeline = random_pipeline(5)
    tensors = tensors_for(pipeline, 100)
    strided = {n: torch.stack((t, t), -1)[..., 0] for n, t in tensors.items()}
    before = {n: t.clone() for n, t in strided.items()}
    want = reference.run(pipeline, tensors)
    for name, value in reference.run(pipeline, strided).items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(strided[n], before[n]) for n in before)

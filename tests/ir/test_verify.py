"""Each rule of the verifier: what it rejects, and the arithmetic in its message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from random_programs import Limits
from strategies import pipelines, random_pipeline

from tilestream import devices
from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, sizes
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Queue, Residency, Role, Shard, Stage, Tensor, Tile, TileOp, Transport
from tilestream.ir.tileops import OPS, PLAIN
from tilestream.ir.verify import verify
from tilestream.kernels.fits import verify_on

H200 = devices.get("h200")


def op(
    kind: str, out: str, *ins: str, width: int = 8, params: tuple[str, ...] = (), dtype: str = "bf16", **attrs
) -> TileOp:
    return TileOp(kind, Tile.of(out, width, dtype), ins, params, tuple(attrs.items()), f"net.py:{out}")


def load(out: str, tensor: str = "x", width: int = 8, dtype: str = "bf16") -> TileOp:
    return op("load", out, width=width, params=(tensor,), dtype=dtype)


def store(tile: str, tensor: str = "y") -> TileOp:
    return TileOp("store", None, (tile,), (tensor,), (), f"net.py:{tensor}")


def tensor(name: str, *shape: int, role: Role = Role.PARAMETER, dtype: str = "bf16") -> Tensor:
    return Tensor.of(name, role, shape, dtype)


X = tensor("x", 8, role=Role.INPUT)
Y = tensor("y", 8, role=Role.OUTPUT)


def pipeline(*stages: Stage, queues: tuple[Queue, ...] = (), tensors: tuple[Tensor, ...] = (X, Y)) -> Pipeline:
    return Pipeline("p", tensors, stages, queues)


def chain(depth: int = 4, transport: Transport = Transport.L2, **changes) -> Pipeline:
    """a -> b -> c, with changes to stage b."""
    a = Stage.of("a", (load("u"), op("relu", "v", "u")))
    b = Stage.of("b", (op("exp", "w", "v"),), **changes)
    c = Stage.of("c", (op("neg", "r", "w"), store("r")))
    queues = (Queue("v", "a", ("b",), transport, depth, "net.py:v"), Queue("w", "b", ("c",), depth=12))
    return pipeline(a, b, c, queues=queues)


def rejected(p: Pipeline, match: str, device: devices.Device | None = None) -> None:
    with pytest.raises(VerifyError, match=match):
        verify_on(p, device)


def test_the_examples_of_this_file_are_legal():
    verify_on(chain(), H200)
    verify_on(chain(0, Transport.DRAM), H200)


# -- stages


def test_stages_must_work():
    rejected(pipeline(), "has no stage")
    idle = Stage.of("idle", (load("u"), op("relu", "v", "u")))
    rejected(pipeline(idle), r"stage 'idle' \(net.py:u\) stores nothing and feeds no queue")
    rejected(chain(replicas=0), "stage 'b' .* has 0 replicas")


def test_a_tile_that_nobody_uses():
    s = Stage.of("s", (load("u"), op("relu", "v", "u"), store("u")))
    rejected(pipeline(s), r"nobody uses tile 'v' \(relu at net.py:v\)")


@pytest.mark.parametrize("times", [0, 2])
def test_outputs_are_stored_exactly_once(times: int):
    s = Stage.of("s", (load("u"), store("u", "z"), *[store("u")] * times))
    p = pipeline(s, tensors=(X, Y, tensor("z", 8, role=Role.OUTPUT)))
    rejected(p, f"output 'y' is stored {times} times")


# -- queues


def test_depths():
    rejected(
        chain(depth=2, replicas=2), r"queue of 'v' .*depth 2 < 4 = 2 tiles a step x 2 replicas of stage 'b'.*at least 4"
    )
    three = chain(depth=2, replicas=3, placement=Shard(1))
    rejected(three, r"depth 2 < 3 = 1 tiles a step x 3 replicas of stage 'b'.*at least 4")
    rejected(chain(depth=3), "depth 3, which is odd.*use 4")
    rejected(chain(depth=2, transport=Transport.DRAM), "depth 2.*use depth 0")


def test_queues_must_join_stages():
    p = chain()
    rejected(replace(p, queues=(*p.queues, Queue("u", "a", ()))), "queue of 'u' from 'a' has no consumer")
    rejected(replace(p, queues=(*p.queues, Queue("u", "a", ("c",)))), "stage 'c' never uses the tile")
    twice = (*p.queues, Queue("v", "a", ("b",), Transport.DRAM, 0))
    rejected(replace(p, queues=twice), "stage 'b' is delivered tile 'v' 2 times")
    a, b, c = p.stages
    both = replace(c, ops=(op("add", "r", "w", "v"), store("r")))
    split = (*p.queues, Queue("v", "a", ("c",)))
    rejected(p.with_stages((a, b, both), split), r"tile 'v' is in 2 l2 queues.*multicast")


def test_a_cycle_is_named():
    a = Stage.of("a", (load("u"), op("add", "v", "u", "w")))
    b = Stage.of("b", (op("exp", "w", "v"), store("w")))
    before = Stage.of("before", (load("k"), op("relu", "l", "k"), store("l", "z")))
    queues = (Queue("v", "a", ("b",)), Queue("w", "b", ("a",)))
    p = pipeline(before, a, b, queues=queues, tensors=(X, Y, tensor("z", 8, role=Role.OUTPUT)))
    rejected(p, "wait for each other: a -> b -> a")
    through_dram = tuple(replace(q, transport=Transport.DRAM, depth=0) for q in queues)
    rejected(replace(p, queues=through_dram), "a -> b -> a")
    itself = Stage.of("a", (load("u"), op("relu", "v", "u"), store("v")))
    rejected(pipeline(itself, queues=(Queue("v", "a", ("a",)),)), "a -> a")


def test_launches_that_wait_for_each_other():
    """The stage graph is acyclic, but a and c are one launch by the L2 queue, and b must run before and after it."""
    a = Stage.of("a", (load("u"), op("relu", "v", "u")))
    b = Stage.of("b", (op("exp", "w", "v"),))
    c = Stage.of("c", (op("add", "r", "w", "v"), store("r")))
    queues = (
        Queue("v", "a", ("c",)),
        Queue("v", "a", ("b",), Transport.DRAM, 0),
        Queue("w", "b", ("c",), Transport.DRAM, 0),
    )
    rejected(pipeline(a, b, c, queues=queues), "cannot be cut at its DRAM queues: .*cycle")


# -- shapes


SHAPES = {
    "load width": ((load("u", width=7), store("u")), "tile 'u' has 7 features, but input 'x' of 8 makes 8"),
    "load dtype": ((load("u", dtype="f32"), store("u")), "load at net.py:u: tile 'u' is f32, but input 'x' is bf16"),
    "load an output": ((load("u", "y"), store("u")), "uses output 'y' where only an input can stand"),
    "store into an input": ((load("u"), store("u", "x")), "uses input 'x' where only an output can stand"),
    "store width": ((load("u", "x7", 7), store("u")), "tile 'u' has 7 features, but output 'y' has 8"),
    "unary": ((load("u"), op("relu", "v", "u", width=9), store("v")), "tile 'v' has 9 features, but relu of 8 makes 8"),
    "linear in": (
        (load("u", "x7", 7), op("linear", "v", "u", params=("w",)), store("v")),
        r"linear at net.py:v: tile 'u' has 7 features, but weight 'w' \(8, 8\) takes 8",
    ),
    "linear out": ((load("u"), op("linear", "v", "u", params=("w",), width=9), store("v")), "'v' has 9 .* makes 8"),
    "linear dtype": (
        (load("u"), op("linear", "v", "u", params=("wf",)), store("v")),
        "bf16, but weight 'wf' is f16",
    ),
    "linear of a vector": ((load("u"), op("linear", "v", "u", params=("b7",)), store("v")), "weight 'b7' has shape"),
    "bias": ((load("u"), op("linear", "v", "u", params=("w", "b7")), store("v")), r"bias 'b7' has shape \(7,\)"),
    "broadcast": (
        (load("u"), load("t", "x7", 7), op("add", "v", "u", "t"), store("v")),
        "operands 'u' of 8 and 't' of 7 features do not broadcast",
    ),
    "vector": ((load("u"), op("add", "v", "u", params=("b7",)), store("v")), "'u' of 8 and 'b7' of 7"),
    "matrix operand": ((load("u"), op("mul", "v", "u", params=("w",)), store("v")), "only a vector or a scalar"),
    "broadcast result": ((load("u"), op("add", "v", "u", width=1, scalar=2.0), store("v")), "'v' has 1 .* makes 8"),
    "cat": ((load("u"), op("cat", "v", "u", "u", width=15), store("v")), r"cat of 8 \+ 8 makes 16"),
    "slice end": ((load("u"), op("slice", "v", "u", start=4, stop=9, width=5), store("v")), "slice 4:9 of 8 features"),
    "slice empty": ((load("u"), op("slice", "v", "u", start=4, stop=4, width=1), store("v")), "slice 4:4 of 8"),
    "slice width": ((load("u"), op("slice", "v", "u", start=4, stop=8, width=5), store("v")), "slice 4:8 makes 4"),
    "reduce": ((load("u"), op("sum", "v", "u"), store("v")), "tile 'v' has 8 features, but sum over features makes 1"),
    "norm vector": ((load("u"), op("rms_norm", "v", "u", params=("b7",)), store("v")), "'b7' has shape .* tile has 8"),
    "affine": (
        (load("u"), op("layer_norm", "v", "u", params=("b",), affine="wb"), store("v")),
        "affine is 'wb' with 1 tensors",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_must_agree(case: str):
    ops, match = SHAPES[case]
    tensors = (
        *(X, Y, tensor("w", 8, 8), tensor("wf", 8, 8, dtype="f16"), tensor("b", 8), tensor("b7", 7)),
        tensor("x7", 7, role=Role.INPUT),
    )
    rejected(pipeline(Stage.of("s", ops), tensors=tensors), match)


def test_tensors():
    s = Stage.of("s", (load("u"), store("u")))
    rejected(pipeline(s, tensors=(X, Y, tensor("w", 8, dtype="f64"))), "tensor 'w' has dtype 'f64'.*bf16, f16, f32")
    rejected(pipeline(s, tensors=(X, Y, tensor("w", 8, 0))), r"tensor 'w' has shape \(8, 0\)")
    rejected(pipeline(s, tensors=(replace(X, axes=(ROWS, *sizes(64, 8))), Y)), r"input 'x' has shape \(64, 8\)")


# -- the device


def wide(width: int, placement: Shard, inputs: int = 8) -> Pipeline:
    s = Stage.of(
        "s", (load("u", width=inputs), op("linear", "v", "u", params=("w",), width=width), store("v")), 1, placement
    )
    x, y = tensor("x", inputs, role=Role.INPUT), tensor("y", width, role=Role.OUTPUT)
    return pipeline(s, tensors=(x, y, tensor("w", width, inputs)))


@pytest.mark.parametrize(("width", "dim", "legal"), [(256, 0, 1), (257, 0, 0), (257, 1, 1), (512, 1, 1), (513, 1, 0)])
def test_widths(width: int, dim: int, legal: int):
    p = wide(width, Shard(dim))
    if legal:
        verify_on(p, H200)
    else:
        rejected(p, rf"tile 'v' has {width} features > {width - 1}, the widest that Shard\({dim}\) holds in registers")


def test_an_operand_of_a_linear_may_be_wider_than_registers():
    verify_on(wide(256, Shard(0), inputs=1536), H200)
    p = wide(256, Shard(0), inputs=320)
    (s,) = p.stages
    cat = (
        load("u0", width=64),
        op("linear", "u1", "u0", params=("w0",), width=256),
        op("cat", "u", "u0", "u1", width=320),
        *s.ops[1:],
    )
    x = tensor("x", 64, role=Role.INPUT)
    joined = pipeline(replace(s, ops=cat), tensors=(x, *p.tensors[1:], tensor("w0", 256, 64)))
    verify_on(joined, H200)
    computed = (*cat[:-1], op("relu", "k", "u", width=320), op("slice", "m", "k", start=0, stop=256, width=256))
    computed += (op("add", "n", "m", "v", width=256), store("n"))
    rejected(joined.with_stages((replace(s, ops=computed),)), "tile 'u' has 320 features > 256")


def test_a_wide_cat_may_be_stored_and_so_may_cross_dram_but_not_the_l2():
    a = Stage.of("a", (load("u"), op("cat", "v", *["u"] * 40, width=320)), 1, Shard(0))
    b = Stage.of("b", (op("linear", "w", "v", params=("k",)), store("w")))
    x, k = tensor("x", 8, role=Role.INPUT), tensor("k", 8, 320)
    p = pipeline(a, b, queues=(Queue("v", "a", ("b",), Transport.DRAM, 0),), tensors=(x, Y, k))
    verify_on(p, H200)
    for launch in cut_at_dram(p):
        verify_on(launch, H200)
    rejected(replace(p, queues=(Queue("v", "a", ("b",)),)), "stage 'a' .*: tile 'v' has 320 features > 256")


def test_replicas_need_sms_of_their_own():
    p = chain(depth=600, replicas=131, placement=Shard(1))
    p = replace(p, queues=tuple(replace(q, depth=264) for q in p.queues))
    rejected(p, r"needs a 1 \+ b 131 \+ c 1 = 133 > 132 SMs of h200", H200)
    verify(p)
    per_launch = replace(p, queues=(replace(p.queues[0], transport=Transport.DRAM, depth=0), p.queues[1]))
    verify_on(per_launch, H200)


def test_weights_must_fit_shared_memory():
    fits = wide(256, Shard(0), inputs=256)
    (s,) = fits.stages
    verify_on(fits.with_stages((s.with_(residency=Residency.RESIDENT),)), H200)
    heavy = wide(256, Shard(0), inputs=512)
    (s,) = heavy.stages
    resident = heavy.with_stages((s.with_(residency=Residency.RESIDENT),))
    rejected(resident, r"stage 's' .* needs weights 262144 \+ .* = \d+ > 232448 bytes of shared memory on h200", H200)
    verify_on(heavy, H200)


def test_the_parts_of_shared_memory_add_up():
    heavy = wide(256, Shard(0), inputs=512)
    (s,) = heavy.stages
    with pytest.raises(VerifyError) as caught:
        verify_on(heavy.with_stages((s.with_(residency=Residency.RESIDENT),)), H200)
    parts, rest = caught.value.cause.split(" needs ")[1].split(" = ")
    assert sum(int(part.split()[-1]) for part in parts.split(" + ")) == int(rest.split()[0])


def test_rings_must_fit_the_l2():
    p = chain(depth=60_000)
    rejected(p, r"'p' take v 60000 x 1024 \+ w 12 x 1024 = 61452288 > 60000000 bytes of L2 on h200", H200)
    verify(p)


# -- all of them


@settings(max_examples=200, deadline=None)
@given(pipelines(Limits(max_width=512)))
def test_random_pipelines_are_legal(p: Pipeline):
    verify(p)
    for launch in cut_at_dram(p):
        verify(launch)


def test_random_pipelines_reach_every_feature():
    made = [random_pipeline(seed) for seed in range(300)]
    kinds = {o.kind for p in made for s in p.stages for o in s.ops}
    # relu_backward jumps at 0: what rounds differently between stages, flips. max_rows takes whole groups of 16 rows.
    assert kinds == set(OPS) - PLAIN - {"relu_backward", "max_rows"}
    assert any(len(q.consumers) > 1 for p in made for q in p.queues)
    assert {q.transport for p in made for q in p.queues} == {Transport.L2, Transport.DRAM}
    assert {len(p.by_role(Role.INPUT)) for p in made} >= {1, 2, 3}
    assert {len(p.by_role(Role.OUTPUT)) for p in made} >= {1, 2, 3}
    assert {s.placement.dim for p in made for s in p.stages} == {0, 1}
    assert {s.residency for p in made for s in p.stages} == set(Residency)
    assert random_pipeline(17) == made[17]

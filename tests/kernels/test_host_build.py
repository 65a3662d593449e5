"""Generated kernels, compiled by g++ and run with threads, against the reference machine.

``TILESTREAM_HOST_FUZZ=400`` tries that many random pipelines instead of a few dozen.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_runs import check, with_stage
from programs import Program, chain, edge_block, elementwise, nerf, slopes
from random_pipelines import random_pipeline, tensors_for
from random_programs import Limits
from samples import bulk, spatial

from tilestream import reference
from tilestream.cuda.host.build import (
    HostRun,
    HostTrap,
    Mutation,
    compile_for_host,
    run_on_host,
)
from tilestream.devices import get
from tilestream.errors import CompileError, QueueTimeout, VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Queue, Residency, Shard, Transport
from tilestream.kernels.fits import verify_on
from tilestream.kernels.stream.emit import emit

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
FUZZ = int(os.environ.get("TILESTREAM_HOST_FUZZ", "48"))


def odd(dtype: str = "bf16") -> Pipeline:
    """Odd widths, a skip over a concatenation, two outputs: a NeRF in small."""
    p = Program("odd", dtype)
    x, d = p.load("x", 63), p.load("d", 27)
    h = p.linear(x, 100, "relu")
    h = p.linear(p.cat(x, h), 96, "relu")
    p.store(p.linear(h, 1))
    p.store(p.linear(p.cat(h, d), 3, "sigmoid"))
    return p.build()


def reductions(width: int) -> Pipeline:
    """LayerNorm, softmax and row values, all in one stage."""
    p = Program("reductions")
    x = p.load("x", width)
    y = p.op("softmax", width, p.layer_norm(p.linear(x, width)))
    top = p.op("max", 1, y)
    p.store(p.op("sub", width, y, top))
    p.store(p.op("mean", 1, y))
    return p.build()


def row_value_times_vector() -> Pipeline:
    """A column that meets a vector is as wide as the vector; a softmax of one feature is one."""
    p = Program("columns")
    x = p.load("x", 40)
    p.store(p.op("mul", 33, p.op("sum", 1, x), params=(p.tensor("v", _parameter(), 33),)))
    p.store(p.op("softmax", 1, p.op("mean", 1, x)))
    return p.build()


def _parameter():
    from tilestream.ir.pipeline import Role

    return Role.PARAMETER


def odd_parts() -> Pipeline:
    """Parts of a concatenation that do not start on a block of columns, made in another order than they stand."""
    p = Program("odd_parts")
    x = p.load("x", 31)
    a, b = p.linear(x, 17), p.linear(x, 29, "tanh")
    p.store(p.linear(p.op("exp", 77, p.cat(b, a, x)), 40))
    return p.build()


def value_of_two_users() -> Pipeline:
    """A product's result goes to a later product and, doubled, into a softmax that takes several passes."""
    p = Program("users")
    h = p.linear(p.load("x", 16), 33)
    p.store(p.op("softmax", 33, p.op("add", 33, h, h)))
    p.store(p.linear(h, 1))
    return p.build()


def slices() -> Pipeline:
    """Slices that start within a block and end within a chunk, of a tile that is spread over both warpgroups."""
    p = Program("slices")
    h = p.op("sqrt", 379, p.op("exp", 379, p.load("x", 379)))
    p.store(p.op("gelu_tanh", 279, p.op("slice", 279, h, start=71, stop=350)))
    p.store(p.op("neg", 300, p.op("slice", 300, h, start=72, stop=372)))
    return with_stage(p.build(), placement=Shard(1))


def ring(depth: int = 2, middle: int = 0, replicas: int = 1) -> Pipeline:
    p = spatial(3)
    stages = tuple(s.with_(replicas=replicas) for s in p.stages)
    stages = (stages[0], stages[1].with_(placement=Shard(middle)), stages[2])
    return p.with_stages(stages, tuple(replace(q, depth=depth) for q in p.queues))


def streamed_once() -> Pipeline:
    """A stage whose products take many chunks while little room is left for its input ring."""
    p = Program("wide")
    x = p.load("x", 272)
    p.store(p.linear(p.layer_norm(p.linear(p.linear(p.op("exp", 272, x), 417), 413, "sigmoid")), 8))
    return with_stage(p.build(), placement=Shard(1))


def derivatives() -> Pipeline:
    p = Program("derivatives", "f32")
    g, x = p.load("g", 40), p.load("x", 40)
    p.store(p.op("relu_backward", 40, g, x))
    p.store(p.op("mul", 40, g, p.op("gelu_slope", 40, x)))
    p.store(p.op("expm1", 40, x))
    return p.build()


NAMED = {
    "derivatives": derivatives,
    "loads ahead": lambda: slopes(4, "gelu_slope", 200),
    "loads ahead, by columns": lambda: with_stage(slopes(3, "tanh", dtype="f16"), placement=Shard(1)),
    "chain 3x64": lambda: chain(3, 64),
    "chain 2x256": lambda: chain(2, 256),
    "nerf": nerf,
    "odd widths": odd,
    "odd widths, f16": lambda: odd("f16"),
    "odd widths, f32": lambda: odd("f32"),
    "chain 2x64, f32": lambda: chain(2, 64, dtype="f32"),
    "resident": lambda: with_stage(chain(2, 128), residency=Residency.RESIDENT, replicas=2),
    "norm, residual, cat": lambda: edge_block(128),
    "norm over split columns": lambda: with_stage(edge_block(320, 2, "silu"), placement=Shard(1)),
    "split 512": lambda: with_stage(chain(2, 512), placement=Shard(1)),
    "split odd": lambda: with_stage(chain(2, 391, "gelu"), placement=Shard(1)),
    "split narrow": lambda: with_stage(chain(2, 33), placement=Shard(1)),
    "many chunks, few slots": streamed_once,
    "elementwise": elementwise,
    "reductions": lambda: reductions(72),
    "reductions over split columns": lambda: with_stage(reductions(300), placement=Shard(1)),
    "row values": row_value_times_vector,
    "odd parts": odd_parts,
    "value of two users": value_of_two_users,
    "slices": slices,
    "ring of two": ring,
    "ring, split in the middle": lambda: ring(middle=1),
    "ring with replicas": lambda: ring(depth=6, replicas=3),
    "launches": lambda: bulk(2),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.every(4)
def test_named(name: str, folder: Path) -> None:
    check(NAMED[name](), 200, folder)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 128, 129, 700])
def test_row_counts(rows: int, folder: Path) -> None:
    check(odd(), rows, folder)
    check(ring(), rows, folder)


def test_multicast_and_skip(folder: Path) -> None:
    p = spatial(4)
    first, *others = p.stages
    last = others[-1]
    late = replace(
        last, ops=tuple(replace(op, tiles=tuple("h1" if i == "h0" else i for i in op.ins)) for op in last.ops)
    )
    queues = [q for q in p.queues if q.tile not in ("h0", "h1")]
    queues.append(Queue("h1", "layer0", ("layer1", "layer3"), depth=8))
    stages = tuple(s.with_(replicas=2) for s in (first, *others[:-1], late))
    check(p.with_stages(stages, tuple(queues)), 500, folder)


def test_weights_in_pairs_of_ctas(folder: Path) -> None:
    check(with_stage(chain(3, 128), group=2, replicas=4, residency=Residency.STREAMED), 700, folder)


@pytest.mark.parametrize("placement", [0, 1])
def test_one_product_in_flight(placement: int, folder: Path) -> None:
    """Streamed inputs, operands in registers and in shared memory, columns that take several pages."""
    changes = {"in_flight": 1, "residency": Residency.STREAMED, "placement": Shard(placement)}
    for program in (chain(3, 128), odd(), edge_block(128)):
        check(with_stage(program, **changes), 300, folder)
    check(with_stage(edge_block(384, 2, "silu"), **{**changes, "placement": Shard(1)}), 130, folder)


def test_again_on_the_same_workspace(folder: Path) -> None:
    check(ring(), 400, folder, launches=3)


@pytest.mark.parametrize("seed", range(3))
def test_bitwise_equal_whatever_the_order_of_copies(seed: int, folder: Path) -> None:
    pipeline = ring()
    tensors = tensors_for(pipeline, 300)
    one = run_on_host(pipeline, tensors, HostRun(folder=folder))
    other = run_on_host(pipeline, tensors, HostRun(folder=folder, seed=seed + 1))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.smoke
def test_nan_and_inf_go_where_eager_takes_them(folder: Path) -> None:
    pipeline = chain(1, 64, "relu", bias=False)
    tensors = tensors_for(pipeline, 70)
    x = next(n for n in tensors if n == "x")
    tensors[x][3, 5] = float("nan")
    tensors[x][69, 0] = float("inf")
    got = run_on_host(pipeline, tensors, HostRun(folder=folder))
    want = reference.run(pipeline, tensors)
    for name in want:
        assert torch.equal(got[name].isnan(), want[name].isnan())
        assert torch.equal(got[name].isinf(), want[name].isinf())


def test_expm1_is_as_exact_as_eager(folder: Path) -> None:
    p = Program("expm1", "f32")
    p.store(p.op("expm1", 64, p.load("x", 64)))
    one = p.build()
    (name,) = (t.name for t in one.tensors if t.name != "x")
    sizes = torch.logspace(-30, 1, 1984)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 89.0]).repeat(22)[:128]])
    got = run_on_host(one, {"x": x.view(64, 64)}, HostRun(folder=folder))[name].view(-1)
    torch.testing.assert_close(got, torch.expm1(x), rtol=4e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("seed", range(FUZZ))
@pytest.mark.every(8)
def test_random_pipelines(seed: int, folder: Path) -> None:
    pipeline = random_pipeline(seed, Limits(max_width=512 if seed % 3 == 0 else 256, f32=seed % 4 == 3))
    try:
        verify_on(pipeline, get("h200"))
    except VerifyError as e:
        pytest.skip(f"does not fit: {e}")
    check(pipeline, random.Random(seed).choice((1, 63, 64, 65, 130, 257)), folder, seed)


# -- what goes wrong


def test_lost_tile_becomes_a_timeout_that_names_the_queue(folder: Path) -> None:
    pipeline = ring()
    lost = Mutation("roles.cuh", "      queue_publish(sync, info, tile);\n", "")
    with pytest.raises(QueueTimeout, match="waited too long for tile [01] of queue 'h"):
        run_on_host(
            pipeline, tensors_for(pipeline, 100), HostRun(folder=folder, mutations=(lost,), limit_s=20, flag_limit_s=1)
        )


def test_lost_arrival_becomes_a_trap(folder: Path) -> None:
    pipeline = chain(1, 64)
    lost = Mutation(
        "roles.cuh",
        "    ring.wait_full();\n    tma_store",
        "    ring.wait_full();\n    ring.wait_full();\n    ring.parity ^= 1;\n    ring.wait_full();\n    tma_store",
    )
    with pytest.raises(HostTrap, match="mbarrier was waited for too long"):
        run_on_host(pipeline, tensors_for(pipeline, 64), HostRun(folder=folder, mutations=(lost,), limit_s=1))


def test_mutation_must_match_once(folder: Path) -> None:
    source = emit(chain(1, 64))
    with pytest.raises(CompileError, match="matches 0 times"):
        compile_for_host(source, HostRun(folder=folder, mutations=(Mutation("roles.cuh", "no such text", ""),)))


def test_missing_compiler_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="apt install g\\+\\+"):
        compile_for_host(emit(chain(1, 72)), HostRun(folder=folder))


def test_dram_queue_becomes_two_launches() -> None:
    assert len(cut_at_dram(bulk(2))) == 2
    assert all(q.transport is Transport.DRAM for q in bulk(2).queues)

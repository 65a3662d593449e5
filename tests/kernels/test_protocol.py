"""The hand-over protocols under ThreadSanitizer, and mutants of them that must be caught.

Each mutant changes the text of one header, or of a generated kernel, in one place. Caught means: a race is
reported, a bounded wait expires, a barrier is misused, or the result is wrong.

``TILESTREAM_TSAN_FUZZ=200`` looks for races in that many random pipelines instead of a dozen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import convolutions
import pytest
from gathers import tensors as indexed
from host_runs import CAUGHT
from mixed_programs import by_columns, residual_stream
from programs import Program, chain, edge_block
from random_pipelines import random_pipeline, tensors_for
from random_programs import Limits
from samples import spatial
from torch import Tensor

from tilestream import reference
from tilestream.cuda.host.build import (
    HostRun,
    Mutation,
    fixed_addresses,
    run_on_host,
    stamped_on_host,
)
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Queue, Residency, Shard
from tilestream.ir.taps import Window
from tilestream.kernels.fits import verify_on
from tilestream.plan.passes.cuts import split_columns, split_spatial

FUZZ = int(os.environ.get("TILESTREAM_TSAN_FUZZ", "12"))
CODE = "int main() { return 0; }"


def _why_not(folder: Path) -> str:
    if shutil.which("g++") is None:
        return "g++ is not installed"
    (folder / "probe.cpp").write_text(CODE)
    build = ["g++", "-fsanitize=thread", str(folder / "probe.cpp"), "-o", str(folder / "probe")]
    if subprocess.run(build, capture_output=True, check=False).returncode:
        return "g++ has no ThreadSanitizer (libtsan) here"
    if subprocess.run([*fixed_addresses(), str(folder / "probe")], capture_output=True, check=False).returncode:
        return "programs built with ThreadSanitizer do not start here"
    return ""


@pytest.fixture(scope="session")
def folder(folder: Path) -> Path:
    if reason := _why_not(folder):
        pytest.skip(reason)
    return folder


# -- pipelines, each as small as its protocol allows


def rings(depth: int = 2, width_of_middle: int = 1) -> Pipeline:
    """Three stages, two queues between neighbours and one that skips the middle stage."""
    p = spatial(3)
    stages = tuple(s.with_(replicas=1) for s in p.stages)
    if width_of_middle == 1:
        stages = (stages[0], stages[1].with_(placement=Shard(1)), stages[2])
    return p.with_stages(stages, tuple(replace(q, depth=depth) for q in p.queues))


def multicast() -> Pipeline:
    """One queue with two consumers, the second of which lags a whole stage behind."""
    p = rings()
    first, *others = p.stages
    late = replace(others[1], ops=tuple(replace(op, tiles=_late(op.ins)) for op in others[1].ops))
    queues = (Queue("h1", "layer0", ("layer1", "layer2"), depth=2), Queue("h2", "layer1", ("layer2",), depth=4))
    return p.with_stages((first, others[0], late), queues)


def _late(ins: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("h1" if name == "h0" else name for name in ins)


def one_stage(layers: int, width: int, placement: int = 0, **changes: int) -> Pipeline:
    p = chain(layers, width)
    stage = p.stages[0].with_(placement=Shard(placement), replicas=2, residency=Residency.STREAMED, **changes)
    return p.with_stages((stage,))


def split_mean() -> Pipeline:
    """One reduction a tile: its scratch is written again for the next tile."""
    p = Program("split_mean")
    p.store(p.op("mean", 1, p.linear(p.load("x", 128), 128)))
    return p.build().with_stages((p.build().stages[0].with_(placement=Shard(1)),))


def wide_ring() -> Pipeline:
    """Tiles of two chunks through one queue."""
    p = chain(2, 128)
    ops = p.stages[0].ops
    first, second = replace(p.stages[0], name="first", ops=ops[:3]), replace(p.stages[0], name="second", ops=ops[3:])
    tile = ops[2].out
    assert tile is not None
    return p.with_stages((first, second), (Queue(tile.name, "first", ("second",), depth=2),))


def by_columns_over_sms(replicas: int = 1, width: int = 128) -> Pipeline:
    """Layers in two parts each: every stage joins two queues, and every queue goes to two stages."""
    p = split_columns(chain(3, width), get("h200"), columns=64)
    return p.with_stages(
        tuple(s.with_(placement=Shard(1), replicas=replicas, residency=Residency.RESIDENT) for s in p.stages),
        tuple(replace(q, depth=2 * replicas) for q in p.queues),
    )


def beside_odd_rows() -> Pipeline:
    """A stage with a queue that also loads rows which bulk copies cannot address."""
    p = Program("beside_odd_rows")
    x = p.load("x", 63)
    p.store(p.linear(p.cat(p.linear(x, 64, "relu"), x), 64))
    made = split_spatial(p.build(), get("h200"))
    return made.with_stages(
        tuple(s.with_(placement=Shard(1), replicas=1) for s in made.stages),
        tuple(replace(q, depth=2) for q in made.queues),
    )


def gathers(placement: int = 0) -> Pipeline:
    """A chunk that comes in order between those that do not, and more of these in a row than the ring has slots."""
    p = Program("gathers")
    a, e, b = p.gather("v", "i", 64), p.load("e", 64), p.gather("u", "j", 640)
    h = p.linear(p.cat(a, e, b), 64, "relu")
    p.store(p.op("add", 64, h, a))
    return p.build().with_stages((p.build().stages[0].with_(placement=Shard(placement), replicas=2),))


WINDOW = Window(9, 7, (3, 3), (1, 2), (1, 1))


def taps(bulk: bool = False) -> Pipeline:
    """More pixels in a row than the ring has slots, then a chunk that comes in order; several tiles a replica."""
    p = convolutions.chain(WINDOW, 72, 64, 64, residual=True, bulk=bulk)
    return p.with_stages((p.stages[0].with_(replicas=2),))


PIPELINES = {
    "rings": rings,
    "rings of pairs": lambda: rings(width_of_middle=0),
    "multicast": multicast,
    "wide ring": lambda: wide_ring(),
    "one layer": lambda: one_stage(1, 128),
    "streamed weights": lambda: one_stage(3, 128),
    "split columns": lambda: one_stage(3, 128, placement=1),
    "split norm": lambda: edge_block(128).with_stages((edge_block(128).stages[0].with_(placement=Shard(1)),)),
    "split mean": lambda: split_mean(),
    "odd rows": lambda: chain(2, 63),
    "queue beside odd rows": lambda: beside_odd_rows(),
    "one in flight": lambda: one_stage(3, 128, in_flight=1),
    "one in flight, split columns": lambda: one_stage(3, 128, placement=1, in_flight=1),
    "pair": lambda: one_stage(3, 128, group=2),
    "layers by columns": lambda: by_columns_over_sms(),
    "layers by columns, two replicas": lambda: by_columns_over_sms(replicas=2),
    "gathers": lambda: gathers(),
    "gathers, split columns": lambda: gathers(placement=1),
    "taps": lambda: taps(),
    "taps in bulk": lambda: taps(bulk=True),
    "fp32 stream": lambda: residual_stream(1, 64),
    "fp32 stream, split columns": lambda: by_columns(residual_stream(1, 192)),
}


def _tensors(name: str, pipeline: Pipeline, rows: int) -> dict[str, Tensor]:
    if name.startswith("taps"):
        return convolutions.tensors(pipeline, WINDOW, 11, seed=1)  # 396 rows
    return (indexed if name.startswith("gathers") else tensors_for)(pipeline, rows, seed=1)


def run(name: str, folder: Path, rows: int = 400, **options) -> float:
    """Relative error against the reference machine."""
    pipeline = PIPELINES[name]()
    tensors = _tensors(name, pipeline, rows)
    got = run_on_host(pipeline, tensors, HostRun(sanitize=True, folder=folder, **options))
    want = reference.run(pipeline, tensors)
    return max(float((got[n].double() - want[n].double()).norm() / want[n].double().norm()) for n in want)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.every(8)
def test_no_race(name: str, folder: Path) -> None:
    assert run(name, folder, launches=2) < 4e-3


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_race_whatever_the_copy_engine_does_first(seed: int, folder: Path) -> None:
    assert run("rings", folder, rows=700, seed=seed) < 4e-3


@pytest.mark.parametrize("name", ["rings", "split norm", "pair"])
def test_no_race_in_what_stamps_write(name: str, folder: Path) -> None:
    pipeline = PIPELINES[name]()
    _, logs = stamped_on_host(pipeline, tensors_for(pipeline, 400, seed=1), HostRun(sanitize=True, folder=folder))
    assert logs and all(role.activities for log in logs for role in log.roles[:2])


@pytest.mark.parametrize("seed", range(FUZZ))
@pytest.mark.every(6)
def test_no_race_in_random_pipelines(seed: int, folder: Path) -> None:
    pipeline = random_pipeline(seed, Limits(max_width=512 if seed % 3 == 0 else 256, f32=False))
    try:
        verify_on(pipeline, get("h200"))
    except VerifyError as e:
        pytest.skip(f"does not fit: {e}")
    run_on_host(pipeline, tensors_for(pipeline, 260, seed), HostRun(sanitize=True, folder=folder, seed=seed))


# -- mutants


@dataclass(frozen=True)
class Mutant:
    """``pipeline`` shows the fault; ``why`` is what the changed line is there for."""

    name: str
    pipeline: str
    change: Mutation
    why: str
    launches: int = 1

    def __str__(self) -> str:
        return self.name


ROLES, KERNEL, TILE, HOST, GATHER = "roles.cuh", "kernel", "tile.cuh", "ptx.cuh", "gather.cuh"
TAPS = "taps.cuh"
FULL = "flag_release(s.flags + (info.lines + tile % info.depth) * LINE"

MUTANTS = (
    Mutant(
        "full flag without release",
        "rings",
        Mutation(ROLES, FULL, FULL.replace("release", "relaxed")),
        "the consumer must see the tile's bytes",
    ),
    Mutant(
        "full flag without acquire",
        "rings",
        Mutation(HOST, "__atomic_load_n(flag, __ATOMIC_ACQUIRE)", "__atomic_load_n(flag, __ATOMIC_RELAXED)"),
        "the consumer must see the tile's bytes",
    ),
    Mutant(
        "credit off by one",
        "rings",
        Mutation(ROLES, "if (tile < info.depth) return;", "if (tile < info.depth + 1) return;"),
        "tile d overwrites tile 0, which must have been read",
    ),
    Mutant(
        "credit of one consumer only",
        "multicast",
        Mutation(ROLES, "for (int c = 0; c < info.consumers; ++c)", "for (int c = 0; c < 1; ++c)"),
        "a slot is free when every consumer has read it",
    ),
    Mutant(
        "no proxy fence behind the acquire",
        "queue beside odd rows",
        Mutation(ROLES, "info, q, tile);\n  fence_async_global();", "info, q, tile);"),
        "an acquire orders ordinary loads; bulk loads need the fence",
    ),
    Mutant(
        "no proxy fence behind the acquires of several lanes",
        "layers by columns",
        Mutation(ROLES, "another may now copy\n    fence_async_global();", "another may now copy"),
        "an acquire orders ordinary loads; bulk loads need the fence",
    ),
    Mutant(
        "the first of several queues alone waited for",
        "layers by columns",
        Mutation(ROLES, "k = lane; k < S::LOAD_OPS; k += WARP", "k = lane; k < 1; k += WARP"),
        "every queue has a flag of its own",
    ),
    Mutant(
        "no proxy fence before the release",
        "rings",
        Mutation(ROLES, "fence_async_global();\n  flag_release", "flag_release"),
        "a release orders what ordinary stores did; bulk stores need the fence",
    ),
    Mutant(
        "no proxy fence after staging",
        "one layer",
        Mutation(KERNEL, "fence_async_shared();", ""),
        "the bulk store reads what ordinary stores staged",
    ),
    Mutant(
        "no proxy fence after odd rows",
        "odd rows",
        Mutation(ROLES, "fence_async_shared();", ""),
        "products read what ordinary stores scattered",
    ),
    Mutant(
        "published when read, not when written",
        "rings",
        Mutation(
            ROLES, "store_wait<0>();\n      bar_arrive(unread);", "store_wait_read<0>();\n      bar_arrive(unread);"
        ),
        "the full flag says that the bytes are in the ring",
    ),
    Mutant(
        "published with the first chunk",
        "wide ring",
        Mutation(ROLES, "if (op.queue >= 0 && op.last)", "if (op.queue >= 0 && op.first)"),
        "the full flag says that all chunks are in the ring",
    ),
    Mutant(
        "staging slot reused before it was read",
        "one layer",
        Mutation(ROLES, "store_wait_read<1>();\n      bar_arrive(unread);", "bar_arrive(unread);"),
        "the bulk store reads the slot after it was issued",
    ),
    Mutant(
        "page freed before its product is done",
        "streamed weights",
        Mutation(KERNEL, "if (c > 0) { mma_wait<1>(); in.release();", "if (c > 0) { in.release();"),
        "products read shared memory until they have been waited for",
    ),
    Mutant(
        "input slot filled while in use",
        "streamed weights",
        Mutation(ROLES, "          ring.wait_empty();\n          bar_expect", "          bar_expect"),
        "a slot is filled again after every reader gave it back",
    ),
    Mutant(
        "page freed by one warpgroup of two",
        "streamed weights",
        Mutation(ROLES, "(S::TILES == 2 ? BOTH : GROUP) * S::PAIR_COUNT", "GROUP * S::PAIR_COUNT"),
        "both warpgroups read each page",
    ),
    Mutant(
        "page freed by one CTA of a pair",
        "pair",
        Mutation(ROLES, "(S::TILES == 2 ? BOTH : GROUP) * S::PAIR_COUNT", "(S::TILES == 2 ? BOTH : GROUP)"),
        "a multicast fills the slot of both CTAs",
    ),
    Mutant(
        "halves of a row read without a barrier",
        "split norm",
        Mutation(TILE, "  named_sync(BOTH_GROUPS, 256);\n  TS_LANES", "  TS_LANES"),
        "each warpgroup reads what the other wrote",
    ),
    Mutant(
        "scratch of a reduction reused in the next tile",
        "split mean",
        Mutation(KERNEL, "    named_sync(BOTH_GROUPS, 256);\n  }\n", "  }\n"),
        "each warpgroup reads what the other wrote before either writes again",
    ),
    Mutant(
        "epoch not advanced",
        "rings",
        Mutation(KERNEL, "(sync.epoch >> 32) + 1", "(sync.epoch >> 32)"),
        "flags of the last launch must not serve this one",
        launches=2,
    ),
    Mutant(
        "gathered rows not waited for",
        "gathers",
        Mutation(GATHER, "  copies_wait();\n", ""),
        "a slot is full when the lanes' own copies are there",
    ),
    Mutant(
        "no proxy fence after gathered rows",
        "gathers",
        Mutation(GATHER, "  fence_async_shared();\n", ""),
        "products read what ordinary copies wrote",
    ),
    Mutant(
        "gathered rows copied into a slot in use",
        "gathers",
        Mutation(GATHER, "  ring.wait_empty();\n", ""),
        "a slot is filled again after every reader gave it back",
    ),
    Mutant(
        "gathered rows kept back before a wait",
        "gathers",
        Mutation(
            GATHER,
            " && coming < GATHERS_AHEAD && warp_value((int)bar_ready(ring.empty(), ring.parity ^ 1), 0)",
            "",
        ),
        "the consumers may free the next slot only after they had these rows",
    ),
    Mutant(
        "gathered rows kept back behind a bulk copy",
        "gathers",
        Mutation(GATHER, "if (follows && ", "if ("),
        "slots are counted back from the one at hand, and the last must be handed over too",
    ),
    Mutant(
        "index of the wrong rows",
        "gathers",
        Mutation(GATHER, "index == op.queue && tile == at", "index == op.queue"),
        "each tile has indices of its own",
    ),
    Mutant(
        "pixels copied into a slot in use",
        "taps",
        Mutation(
            TAPS,
            "  pixels.read(p, w, op.padded, tile);\n  ring.wait_empty();\n",
            "  pixels.read(p, w, op.padded, tile);\n",
        ),
        "a slot is filled again after every reader gave it back",
    ),
    Mutant(
        "pixels of the wrong tile",
        "taps",
        Mutation(TAPS, "tile == at && window == number", "window == number"),
        "each tile has pixels of its own",
    ),
    Mutant(
        "pixels of the row beside",
        "taps",
        Mutation(TAPS, " && (u32)x < (u32)w.in_width", ""),
        "what lies beside a picture is zero, not the next row's end",
    ),
    Mutant(
        "pixels in bulk into a slot in use",
        "taps in bulk",
        Mutation(TAPS, "    ring.wait_empty();\n    bar_expect", "    bar_expect"),
        "a slot is filled again after every reader gave it back",
    ),
    Mutant(
        "pixels in bulk from the picture's corner",
        "taps in bulk",
        Mutation(TAPS, "(line - image * w.height) * w.stride_y + w.lowest_y", "(line - image * w.height) * w.stride_y"),
        "a box begins in the padding",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
@pytest.mark.every(8)
def test_mutant_is_caught(mutant: Mutant, folder: Path) -> None:
    try:
        error = run(
            mutant.pipeline, folder, mutations=(mutant.change,), launches=mutant.launches, limit_s=3.0, flag_limit_s=1.5
        )
    except CAUGHT:
        return
    assert not error < 4e-3, f"not caught: {mutant.why}"

"""Memory models of the fast engine: what a request costs, that bytes are conserved, that better memory is no slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilestream.errors import SparseError
from tilestream.sparse import engine
from tilestream.sparse.kernels import Wiring, chain, elementwise, hashed, matmul, matmul_parallel
from tilestream.sparse.memory import NO_MEMORY, SIMPLE_HBM, Memory, hbm
from tilestream.sparse.storage import Format, pack
from tilestream.sparse.stream.graph import with_broadcasts

ARRAYS = {name: hashed(24, 3, seed) for name, seed in (("B", 1), ("C", 2), ("W", 3))}
KERNELS = {k.graph.name: k for k in (matmul("ikj"), matmul("kij"), chain(), elementwise("add"), matmul_parallel(4))}


def run(name: str, memory: Memory, **options):
    return KERNELS[name].run(engine.run, ARRAYS, (24, 24), memory=memory, **options)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("memory", [SIMPLE_HBM, hbm(), hbm(scratchpad_bytes=8192)], ids=["simple", "hbm", "cached"])
def test_memory_changes_times_only(name: str, memory: Memory):
    free, paid = run(name, NO_MEMORY), run(name, memory)
    for tensor in free.outputs:
        np.testing.assert_array_equal(paid.outputs[tensor].values, free.outputs[tensor].values)
    assert paid.cycles > free.cycles
    assert (paid.bytes, paid.flops) == (free.bytes, free.flops)
    for node in paid.nodes:
        assert node.busy + node.wait_input + node.wait_room + node.wait_memory == node.end_cycle
        assert min(node.wait_input, node.wait_memory) >= 0
    assert run(name, memory).nodes == paid.nodes


@pytest.mark.parametrize("name", KERNELS)
def test_the_simple_model_moves_every_word_once(name: str):
    paid = run(name, SIMPLE_HBM)
    assert paid.memory["bytes"] == paid.bytes
    assert paid.cycles >= paid.bytes / SIMPLE_HBM.bandwidth_bytes_per_cycle


def copy_of(level: str) -> tuple:
    """X_i = B_i, and its tensors."""
    w = Wiring()
    crd, ref = w.scan("B", "i", 0, w.root("B"))
    w.write("X", w.array("B", ref), crd)
    form = Format((level,))
    return with_broadcasts("copy", tuple(w.nodes)), {"B": pack("B", np.arange(1.0, 17.0), form)}, {"X": ((16,), form)}


def test_the_simple_model_by_hand():
    """A request at t is dealt at t + 1, served from t + 2, done 16 later, and known one later: 19 cycles.

    The first word of a bundle goes to channel o, the next to o + 1, o + 3, o + 6 and so on: eight words use each of
    the 8 channels once, and the second bundle starts where the first one's count leaves the turn.
    """
    graph, tensors, shapes = copy_of("compressed")
    paid = engine.run(graph, tensors, shapes=shapes, memory=SIMPLE_HBM)
    scan = paid.node("B_i")
    assert scan.wait_memory == 19 * 3  # bounds, and two batches of 8
    # Root's token comes at 1; batches leave at 1 + 2 * 19 and 1 + 3 * 19.
    traced = engine.run(graph, tensors, shapes=shapes, memory=SIMPLE_HBM, trace=True)
    crd = next(s for port, s in traced.streams.items() if str(port) == "B_i.crd")
    assert crd.times.tolist() == [1 + 38 + 1] * 8 + [1 + 57 + 1] * 8 + [1 + 57 + 1, 1 + 57 + 2]
    assert paid.node("X_vals_write").wait_memory >= 19 * 16  # one value at a time


def test_bursts_by_hand():
    """16 values of 4 bytes are one burst of 64; the first arrives after its transfer and the latency."""
    graph, tensors, shapes = copy_of("dense")
    memory = hbm(channels=1, bandwidth_bytes_per_cycle=16, latency=40, burst=64)
    paid = engine.run(graph, tensors, shapes=shapes, memory=memory, trace=True)
    assert paid.memory == {"transfers": 1 + 1 + 2, "hits": 0, "bytes": 64 * 4}  # values; values out; crd and seg out
    values = next(s for port, s in paid.streams.items() if str(port) == "B_vals.val")
    assert values.times[:16].tolist() == [2 + 4 + 40] * 16 or values.times[0] == 2 + 4 + 40
    assert paid.node("X_vals_write").end_cycle >= values.times[15] + 4 + 40


@pytest.mark.parametrize("name", KERNELS)
def test_better_memory_is_no_slower(name: str):
    base = hbm(channels=2, bandwidth_bytes_per_cycle=4, latency=80, burst=32, outstanding=2)
    slow = run(name, base).cycles
    for better in (
        {"latency": 20},
        {"bandwidth_bytes_per_cycle": 64.0},
        {"outstanding": 64},
        {"scratchpad_bytes": 1 << 20},
    ):
        assert run(name, replace(base, **better)).cycles <= slow, better


def test_a_scratchpad_that_holds_everything_reads_every_line_once():
    paid, cached = run("chain", hbm()), run("chain", hbm(scratchpad_bytes=1 << 20))
    assert cached.memory["hits"] > 0
    assert cached.memory["transfers"] + cached.memory["hits"] == paid.memory["transfers"]
    lines = sum(-(-4 * x.size // 64) + 1 for t in KERNELS["chain"].tensors(ARRAYS).values() for x in _parts(t))
    written = cached.memory["transfers"] - lines
    assert written <= sum(n.bytes_written for n in cached.nodes) // 64 + 8


def _parts(tensor):
    return [tensor.values, *(x for level in tensor.levels for x in (level.seg, level.crd) if x is not None)]


def test_a_fast_memory_costs_next_to_nothing():
    fast = hbm(latency=1, bandwidth_bytes_per_cycle=1e9, outstanding=1000)
    free = run("matmul_ikj", NO_MEMORY).cycles
    assert run("matmul_ikj", fast).cycles <= 1.05 * free + 50


def test_memory_with_bounded_channels():
    tight, free = run("matmul_ikj", hbm(), depth=64), run("matmul_ikj", hbm())
    assert tight.cycles >= 0.98 * free.cycles
    np.testing.assert_array_equal(tight.outputs["X"].values, free.outputs["X"].values)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"channels": 0}, "channels=0"),
        ({"burst": 6}, "multiple of 4"),
        ({"bandwidth_bytes_per_cycle": 0}, "bandwidth"),
        ({"scratchpad_bytes": 64}, "scratchpad"),
    ],
)
def test_impossible_memories_are_refused(wrong: dict, says: str):
    with pytest.raises(SparseError, match=says):
        hbm(**wrong)

"""Channels of the fast engine: rings that grow, depths by stream, deadlocks that name the cycle."""

from __future__ import annotations

import numpy as np
import pytest

from tilestream.errors import SparseError, StreamDeadlock
from tilestream.sparse import engine, run_spec
from tilestream.sparse.engine import build, machine
from tilestream.sparse.kernels import chain, hashed, matmul, matmul_parallel
from tilestream.sparse.memory import SIMPLE_HBM, hbm

ARRAYS = {name: hashed(20, 3, seed) for name, seed in (("B", 1), ("C", 2), ("W", 3))}


@pytest.mark.parametrize("memory", [None, SIMPLE_HBM, hbm(scratchpad_bytes=4096)], ids=["none", "simple", "hbm"])
def test_the_size_of_the_rings_changes_nothing(monkeypatch: pytest.MonkeyPatch, memory):
    """Unbounded channels are rings that grow where they have to; what is seen of them is nothing."""
    options = {} if memory is None else {"memory": memory}
    wide = chain().run(engine.run, ARRAYS, (20, 20), trace=True, **options)
    monkeypatch.setattr(build, "_RING", 8)
    monkeypatch.setattr(machine, "_STORE", 1)
    monkeypatch.setattr(machine, "_TABLE", 4)
    narrow = chain().run(engine.run, ARRAYS, (20, 20), trace=True, **options)
    assert narrow.nodes == wide.nodes
    assert narrow.memory == wide.memory
    for port, stream in wide.streams.items():
        np.testing.assert_array_equal(narrow.streams[port].times, stream.times)
    np.testing.assert_array_equal(narrow.outputs["X"].values, wide.outputs["X"].values)


def test_a_ring_grows_where_a_stream_has_to_wait():
    """Inner products read one operand again for each row: far more than a ring holds."""
    kernel = matmul("ijk")
    arrays = {"B": hashed(60, 2, 1), "C": hashed(60, 2, 2)}
    result = kernel.run(engine.run, arrays, (60, 60))
    np.testing.assert_allclose(result.outputs["X"].to_dense(), arrays["B"] @ arrays["C"])


def test_deep_channels_lose_nothing():
    free = matmul("ikj").run(engine.run, ARRAYS, (20, 20))
    cycles = [matmul("ikj").run(engine.run, ARRAYS, (20, 20), depth=d).cycles for d in (2, 4, 16, 64, 4096)]
    assert cycles[0] > free.cycles == cycles[-1]
    assert cycles == sorted(cycles, reverse=True)


def test_only_the_streams_named_are_bounded():
    kernel = matmul("ikj")
    tight = kernel.run(engine.run, ARRAYS, (20, 20), depth={"meet_k.crd": 2})
    assert tight.node("meet_k").wait_room > 0
    assert all(n.wait_room == 0 for n in tight.nodes if n.name != "meet_k")
    with pytest.raises(SparseError, match=r"no stream is called 'meet_k\.nothing'"):
        kernel.run(engine.run, ARRAYS, (20, 20), depth={"meet_k.nothing": 2})
    with pytest.raises(SparseError, match="depth 0"):
        kernel.run(engine.run, ARRAYS, (20, 20), depth=0)


@pytest.mark.parametrize(
    "kernel", [matmul("ikj"), chain(), matmul_parallel(3, ordered=True)], ids=lambda k: k.graph.name
)
def test_a_deadlock_names_the_cycle(kernel):
    with pytest.raises(StreamDeadlock) as caught:
        kernel.run(engine.run, ARRAYS, (20, 20), depth=1)
    with pytest.raises(StreamDeadlock) as reference:
        kernel.run(run_spec.run, ARRAYS, (20, 20), depth=1)
    waits = [part.rsplit(": ", 1)[-1] for part in caught.value.cause.split("; ")]
    names = {part.split(" waits ")[0] for part in waits}
    assert names == {part.rsplit(": ", 1)[-1].split(" waits ")[0] for part in reference.value.cause.split("; ")}
    for part, after in zip(waits, [*waits[1:], waits[0]], strict=True):
        assert after.split(" waits ")[0] in part.split(" waits ")[1]

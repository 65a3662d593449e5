"""Channels of the fast engine: rings that grow, depths by stream, deadlocks that name the cycle."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tilestream.errors import SparseError, StreamDeadlock
from tilestream.sparse import engine, run_spec
from tilestream.sparse.engine import build, compiled, layout, machine
from tilestream.sparse.kernels import Wiring, chain, elementwise, hashed, matmul, matmul_dense, matmul_parallel
from tilestream.sparse.memory import SIMPLE_HBM, hbm
from tilestream.sparse.storage import Format, pack
from tilestream.sparse.stream.graph import Port, with_broadcasts

runner = importlib.import_module("tilestream.sparse.engine.run")  # the package's attribute of this name is the function
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


@pytest.mark.parametrize("depth", [None, 8, 13, 64])
@pytest.mark.parametrize("make", [chain, matmul_dense, lambda: matmul("kij"), lambda: elementwise("mul")])
@pytest.mark.every(3)
def test_inner_loops_change_nothing(monkeypatch: pytest.MonkeyPatch, make, depth: int | None):
    kernel, arrays = make(), {name: hashed(40, 2, seed) for name, seed in (("B", 1), ("C", 2), ("W", 3))}
    fast = kernel.run(engine.run, arrays, (40, 40), trace=True, depth=depth)

    def without_loops(*given):
        made = build.build(*given)
        assert made.nodes[:, layout.PLAIN].sum() > len(made.nodes) / 2
        made.nodes[:, layout.PLAIN] = 0
        return made

    monkeypatch.setattr(runner, "build", without_loops)
    slow = kernel.run(engine.run, arrays, (40, 40), trace=True, depth=depth)
    assert fast.nodes == slow.nodes
    for port, stream in slow.streams.items():
        np.testing.assert_array_equal(fast.streams[port].tags, stream.tags)
        np.testing.assert_array_equal(fast.streams[port].times, stream.times)


def minus_largest(n: int):
    """X_ij = B_ij - max_j B_ij, its tensors and shapes: a row has to be kept until its largest value is known."""
    w = Wiring()
    i, ref = w.scan("B", "i", 0, w.root("B"))
    j, ref = w.scan("B", "j", 1, ref)
    values = w.array("B", ref)
    w.add("reduce", "largest", {"op": "max"}, val=values)
    w.write("X", w.alu("sub", values, w.repeat("largest", Port("largest", "val"), j)), i, j)
    form = Format(("dense", "dense"))
    array = np.random.default_rng(0).random((3, n))
    return array, (with_broadcasts("rows", tuple(w.nodes)), {"B": pack("B", array, form)}), {"X": ((3, n), form)}


def test_a_ring_grows_where_a_stream_has_to_wait():
    array, given, shapes = minus_largest(5000)
    result = engine.run(*given, shapes=shapes)
    np.testing.assert_allclose(result.outputs["X"].to_dense(), array - array.max(axis=1, keepdims=True))
    with pytest.raises(StreamDeadlock, match="largest"):
        engine.run(*given, shapes=shapes, depth=4096)
    assert engine.run(*given, shapes=shapes, depth=5008).cycles >= result.cycles


def test_a_graph_that_holds_too_much_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_MOST_BYTES", 1 << 19)
    _, given, shapes = minus_largest(50000)
    with pytest.raises(SparseError, match=r"have to hold .* GiB; \S+ now wants [\d,]+ tokens"):
        engine.run(*given, shapes=shapes)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_TELL_S", 0.0)
    monkeypatch.setattr(runner, "_CALLS", 10)
    lines: list[str] = []
    chain().run(engine.run, ARRAYS, (20, 20), progress=lines.append)
    assert lines[0].startswith("chain: cycle ") and lines[-1].endswith("tokens")


def test_compiled_code_needs_no_folder_to_write_to(caplog: pytest.LogCaptureFixture):
    """A function of no file has none either: numba refuses to keep it, and it is compiled all the same."""
    scope: dict = {}
    exec("def twice(x):\n    return x + x\n", scope)
    assert compiled.cached(scope["twice"])(21) == 42
    assert "NUMBA_CACHE_DIR" in caplog.text


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

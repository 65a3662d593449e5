"""What the driver is called with for each kind of launch; no GPU, so calls are written down and not made."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tilestream.cuda import driver

bindings = pytest.importorskip("cuda.bindings.driver")

GRID, THREADS, STREAM, SHARED, HANDLE = (132, 2), 384, 7, 1024, 99


class Calls:
    """The driver, with launches that only take note."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuLaunch"):
            return getattr(bindings, name)

        def launch(*args: Any) -> tuple[Any]:
            self.made.append((name, args))
            return (bindings.CUresult.CUDA_SUCCESS,)

        return launch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(driver, "_driver", lambda: made)
    return made


PARAMS = bytes(range(16))


def prepared(cooperative: bool, dependent: bool) -> driver.PreparedLaunch:
    function: Any = SimpleNamespace(handle=HANDLE, shared_bytes=SHARED, name="kernel")
    return driver.Function.prepare(function, GRID, THREADS, STREAM, PARAMS, cooperative, dependent)


def argument(where: int) -> bytes:
    """The one argument that the driver reads, whose address is at ``where``."""
    return ctypes.string_at(ctypes.c_void_p.from_address(where).value or 0, len(PARAMS))


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_plain_launch(calls: Calls, cooperative: bool) -> None:
    launch = prepared(cooperative, dependent=False)
    launch()
    ((name, args),) = calls.made
    assert name == ("cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel")
    assert args[:9] == (HANDLE, *GRID, 1, THREADS, 1, 1, SHARED, STREAM) and argument(args[9]) == PARAMS
    assert args[10:] == (() if cooperative else (0,))


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_launch_that_starts_early(calls: Calls, cooperative: bool) -> None:
    launch = prepared(cooperative, dependent=True)
    launch()
    ((name, (config, handle, where, extra)),) = calls.made
    assert name == "cuLaunchKernelEx" and (handle, extra) == (HANDLE, 0) and argument(where) == PARAMS
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (*GRID, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (THREADS, 1, 1)
    assert config.sharedMemBytes == SHARED and int(config.hStream) == STREAM
    ids = bindings.CUlaunchAttributeID
    early, together = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert [a.id for a in config.attrs] == [early, together][: 1 + cooperative] and config.numAttrs == 1 + cooperative
    assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_zeros_are_a_launch_and_a_node_of_a_graph(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    address, words, after = 1 << 40, 1032, ["before"]
    made: list[tuple[Any, ...]] = []
    good = bindings.CUresult.CUDA_SUCCESS
    for name, value in (("cuMemsetD32Async", ()), ("cuCtxGetCurrent", (11,)), ("cuGraphAddMemsetNode", ("node",))):
        monkeypatch.setattr(calls, name, lambda *args, v=value: (made.append(args), (good, *v))[1], raising=False)
    clear = driver.Clearing(address, words, STREAM)
    clear()
    assert made.pop() == (address, 0, words, STREAM)
    assert clear.add_to("graph", after) == "node"
    graph, nodes, count, node, context = made.pop()
    assert (graph, nodes, count, context) == ("graph", after, 1, 11)
    assert (int(node.dst), node.value, node.elementSize, node.width, node.height) == (address, 0, 4, words, 1)

"""Seeds, a cache folder of the test's own, and the reasons why tests that need a GPU or NVRTC are skipped."""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collected import GROUP, SKIPPED, WHOLE_SUITE, first_line, left_out, ordered
from hypothesis import settings
from lost_context import leave_if_lost
from streamed import without_inductor
from torch import Tensor, fx
from whole_graphs import check

from tilestream import cuda
from tilestream.cuda.compile import compiler_version
from tilestream.graph.rewrites import table
from tilestream.run import inductor, timing

# The same examples each time, so that a failure is of a change and not of luck. `--hypothesis-profile random` (and
# `--hypothesis-seed N`) looks for others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run all cases of tests that are marked every(n)")


@pytest.hookimpl(wrapper=True)  # xdist, in between, asks for the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    named = any("::" in argument for argument in config.args)  # by somebody who wants that one
    if not named and not config.getoption("--all-cases") and (left := set(left_out(items))):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    lacking = {"gpu": cuda.available()}
    if compiler_version() == "none":
        lacking["nvrtc"] = "NVRTC is not installed (pip install 'tilestream[cuda]')"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))  # one process at a time has the GPU
        for mark, reason in lacking.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
                item.stash[SKIPPED] = True
    items[:] = ordered(items)
    yield
    for item in items:
        # xdist 3.8 writes the group to where pytest before 9.2 had the name that a worker reports.
        if (grouped := getattr(item, "_nodeid", item.nodeid)) != item.nodeid:
            item._id = type(item.id).parse(grouped)  # type: ignore[attr-defined]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays: a collection of garbage need not walk through torch each time. Nor need there be one
    every 700 objects: with Python's thresholds, collections were a twelfth of the processor's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 10)
    _say(session.config, [bool(item.get_closest_marker("gpu")) for item in session.items])


class Workers:
    """Of several processes, the one that shows what the others find is told what they collected by xdist."""

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if node.gateway.id == "gw0":
            _say(node.config, [name.endswith(GROUP) for name in ids])


def _say(config: pytest.Config, on_gpu: list[bool]) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and len(on_gpu) >= WHOLE_SUITE:
        terminal.write_line(first_line(len(on_gpu), sum(on_gpu), cuda.available()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    leave_if_lost(item, report)
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the cores take one each, and so do the processes that they start.

    Inductor takes the processor's word for its vector instructions: for each empty cache, it would try them for 10 s.
    Torch's trace of a compilation is written for nobody: pytest since 9.2 listens to every logger that does not
    propagate, and a twentieth of the time of ``torch.compile`` went into what it then drops. The level of what is
    caught is set once: with ``log_level``, pytest sets the root's and sets it back three times a test, and each time
    Python empties what a thousand loggers know of their levels.
    """
    logging.getLogger().setLevel(logging.INFO)
    if (logs := config.pluginmanager.get_plugin("logging-plugin")) is not None:
        for handler in (logs.caplog_handler, logs.report_handler):
            handler.setLevel(logging.INFO)
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    logging.getLogger("torch.__trace").addHandler = lambda hdlr: None
    table.check = check  # after each rewrite of each test
    if config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.register(Workers())
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Layers of fp32 may go to the tensor cores."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(name="without_inductor")
def _without_inductor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not taken runs eagerly on a CPU (``streamed.without_inductor``): for tests of what is taken."""
    if request.node.get_closest_marker("gpu") is None:
        without_inductor(monkeypatch)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    # Not torch.manual_seed, which keeps a trace of the stack for each kind of device that is not there: 1.5 ms a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache folder that no other test has written to, but for programs of the host."""
    path = tmp_path_factory.mktemp("cache")
    (path / "host").symlink_to(folder, target_is_directory=True)
    monkeypatch.setenv("TILESTREAM_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are built for the host: one folder for all processes, since a program's name is a hash of it."""
    own = tmp_path_factory.getbasetemp()
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "host"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of ours that no rule foresees fails a test, where a user would lose one region and read a line."""
    monkeypatch.setenv("TILESTREAM_STRICT", "1")


@pytest.fixture(autouse=True)
def _guards_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo ends each compilation with one timed run of its guards, for its log, and empties the processor's caches
    before: 22 ms, and everybody else's caches."""
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        monkeypatch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)


@pytest.fixture(autouse=True)
def _clocks_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that another test of this process timed, or that stood in for one, is not warm for this one."""
    monkeypatch.setattr(timing, "_timed_until_s", [-math.inf])


@pytest.fixture(autouse=True)
def _planned_anew():
    """What AOTAutograd's cache holds of another test was planned there. A test that is about that cache turns it on."""
    from torch._functorch import config

    from tilestream.plan import chooser

    chooser.forget()
    with config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled nothing: what was planned, built and said belongs to the test."""
    from tilestream import announce
    from tilestream.run import executable, prepare

    torch._dynamo.reset()
    monkeypatch.setattr(announce, "_said", set())
    monkeypatch.setattr(executable, "_executables", {})
    monkeypatch.setattr(prepare, "_plans", {})
    monkeypatch.setattr(prepare, "_analyses", [])


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor would compile runs as it is: its compiler takes seconds a graph."""

    def interpreted(graph: fx.GraphModule, inputs: Sequence[Any], kwargs: Any) -> tuple[Any, list[Any]]:
        def call(given: list[Any]) -> list[Any]:
            return list(fx.Interpreter(graph).run(*given))

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        values = [o.meta.get("val") if isinstance(o, fx.Node) else None for o in graph.graph.output_node().args[0]]  # pyright: ignore
        return call, [tuple(v.stride()) if isinstance(v, Tensor) else None for v in values]

    monkeypatch.setattr(inductor, "compile_inner", interpreted)

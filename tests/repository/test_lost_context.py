"""One test that loses the CUDA context costs itself alone, where tests run in workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import TESTS, pythonpath

CONFTEST = """
import lost_context, pytest
lost = []
lost_context.is_lost = lambda: bool(lost)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    lost_context.leave_if_lost(item, report)
    return report
"""
THEM = """
import conftest, pytest
pytestmark = pytest.mark.gpu

def test_before(): pass

def test_that_traps():
    conftest.lost.append(1)
    assert False, "an illegal access"

@pytest.mark.parametrize("k", range(5))
def test_behind(k):
    assert not conftest.lost
"""


def test_the_tests_behind_it_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(THEM)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: a GPU\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environ["PYTHONPATH"] = pythonpath(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "1 failed, 6 passed" in done.stdout, said
    assert "test_that_traps lost the CUDA context" in said and "an illegal access" in said


class Late:
    """A plugin that comes after the conftest files, as xdist's does in a worker."""

    def pytest_collection_modifyitems(self) -> None: ...


def test_tests_have_their_groups_before_xdist_reads_them(pytestconfig: pytest.Config) -> None:
    """Hooks are called last come, first served: xdist's would find no groups, and every process would take the GPU."""
    late = Late()
    pytestconfig.pluginmanager.register(late)
    try:
        called = [each.function for each in reversed(pytestconfig.hook.pytest_collection_modifyitems.get_hookimpls())]
    finally:
        pytestconfig.pluginmanager.unregister(late)
    where = [f.__code__.co_filename if f != late.pytest_collection_modifyitems else "late" for f in called]
    assert where.index(str(TESTS / "conftest.py")) < where.index("late")


@pytest.mark.xdist_group("grouped")
def test_a_worker_reports_the_group_with_the_name(request: pytest.FixtureRequest) -> None:
    """Else each process makes what a group's tests share, and every one of them takes the GPU."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("groups are for --dist loadgroup")
    assert request.node.nodeid.endswith("@grouped")

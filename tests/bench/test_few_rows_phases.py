"""Clocks of kernels on few rows: both sides name the same marks, and only kernels that ask for them have them."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest
from places import ROOT

from tilestream import cuda
from tilestream.cuda.cache import compiled
from tilestream.plan.passes.share_tile import share_tile


@pytest.fixture
def phases() -> ModuleType:
    return importlib.import_module("benchmarks.run.few_rows_phases")


def test_marks_have_the_same_names_in_the_same_order(phases: ModuleType) -> None:
    header = (ROOT / "src/tilestream/kernels/include/marks.cuh").read_text()
    found = re.search(r"enum Mark : int \{ (.*?), MARKS = (\d+) \}", header)
    assert found is not None
    assert tuple(name.lower().replace("_", " ") for name in found[1].split(", ")) == phases.MARKS
    assert int(found[2]) == phases.PLACES


@pytest.mark.nvrtc
def test_only_a_kernel_that_is_asked_for_marks_has_them(phases: ModuleType) -> None:
    pipeline = share_tile(phases.program("G1"), phases.CASES["G1"][0])
    assert b"ts_marks" in compiled(phases.marked(pipeline)).cubin
    assert all(b"ts_marks" not in report.cubin for report in cuda.compile_only(pipeline))

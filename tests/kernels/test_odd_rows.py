"""Inputs whose rows bulk copies cannot address: of every width, with ragged ends, by the loader warps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from host_runs import check, with_stage
from programs import Program

from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.kernels.stream.emit import emit

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def joined(dtype: str) -> Pipeline:
    """A layer of columns that come from inputs of one column, of a part of eight, of more than a chunk; and a sum with
    rows that an epilogue takes."""
    program = Program("joined", dtype)
    given = [program.load(f"x{n}", n) for n in (1, 3, 27, 63, 65, 131)]
    h = program.linear(program.cat(*given), 63, "relu")
    program.store(program.op("add", 63, h, given[3]))
    return program.build()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_rows_of_odd_widths(dtype: str, folder: Path) -> None:
    """Behind each tensor lie NaNs: what is read of them and not dropped shows."""
    pipeline = with_stage(joined(dtype), replicas=132, residency=Residency.STREAMED)
    assert emit(pipeline).text.count("{-1, ") >= 8
    for rows in (1, 65, 200):
        check(pipeline, rows, folder)

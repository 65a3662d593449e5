"""DLRM's interaction, which has kernels of its own, written as a Pipeline."""

from __future__ import annotations

import pytest
import torch

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.read import axes, program, tensors
from tilestream.ir.verify import verify
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64

NAMES = axes("rows f=6 one=1 i=3 pair=3 out=9 r0 r1")
TENSORS = "X[rows,f] W0[r0,f] W1[r1,f] i0[rows]:i64 i1[rows]:i64 first[pair]:i32 second[pair]:i32 >Y[rows,out]"
INTERACTION = """
    x[rows,one,f] = copy X[rows,f]
    a[rows,one,f] = copy W0[i0[rows],f]
    b[rows,one,f] = copy W1[i1[rows],f]
    v[rows,i,f] = cat x[rows,i,f] a[rows,i-1,f] b[rows,i-2,f]
    p[rows,pair]:f32 = product v[rows,first[pair],f] v[rows,second[pair],f]
    x[rows,0,f] -> Y[rows,f]
    p -> Y[rows,pair+6]
"""


@pytest.mark.parametrize("rows", [0, 1, 150])
def test_all_pairs_of_a_dense_vector_and_rows_of_tables(rows: int) -> None:
    stage = Stage("s", program(INTERACTION, NAMES), (Loop("rows", 16),), (Spread(Level.GRID, 3, ("rows",)),))
    p = Pipeline("interaction", tensors(TENSORS, NAMES), (stage,))
    verify(p)
    torch.manual_seed(0)
    below = torch.tril_indices(3, 3, -1)
    x, *tables = (torch.randn(n, 6).double() for n in (rows, 40, 7))
    index = [torch.randint(len(t), (rows,)) for t in tables]
    given = {"X": x, "W0": tables[0], "W1": tables[1], "i0": index[0], "i1": index[1]}
    given |= {"first": below[0].int(), "second": below[1].int()}
    every = torch.stack([x, *(t[i] for t, i in zip(tables, index, strict=True))], 1)
    want = torch.cat([x, (every @ every.mT)[:, below[0], below[1]]], 1)
    torch.testing.assert_close(run_meshes(p, given, FLOAT64)["Y"], want)

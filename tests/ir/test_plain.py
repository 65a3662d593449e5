"""Ops of rows written out as indexed reductions over named axes mean what they meant."""

from __future__ import annotations

import pytest
import torch
from random_pipelines import random_pipeline, tensors_for
from random_programs import Limits

from tilestream import reference
from tilestream.ir.axes import Level
from tilestream.ir.derive import exchanges
from tilestream.ir.lengths import sizes_at
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.pipeline import Pipeline, Role, Shard, Stage, Tensor, Tile, TileOp
from tilestream.ir.plain import plain
from tilestream.ir.traffic import traffic
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64

SMALL = Limits(max_width=40, ops=14)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.every(3)
def test_random_pipelines_mean_the_same_written_out(seed: int) -> None:
    p = random_pipeline(seed, SMALL)
    tensors = {n: x.double() for n, x in tensors_for(p, rows=150, seed=seed).items()}
    want = reference.run(p, tensors, precision="float64")
    got = run_meshes(plain(p), tensors, FLOAT64)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
def test_both_notations_count_the_same_bytes_in_dram(seed: int) -> None:
    p = random_pipeline(seed, SMALL)
    written = plain(p)
    assert mesh_traffic(written, sizes_at(written, 150))["dram"] == traffic(p, 150).dram


@pytest.mark.parametrize("rows", [7, 1000])
def test_of_a_large_table_only_the_rows_that_are_taken_count(rows: int) -> None:
    """7 of 500 rows in DRAM, or all 500."""
    tensors = (
        Tensor.table("T", 500, 32, "bf16"),
        Tensor.of("I", Role.INPUT, (), "i64"),
        Tensor.of("Y", Role.OUTPUT, (32,), "bf16"),
    )
    ops = (TileOp("load", Tile.of("x", 32, "bf16"), (), ("T", "I")), TileOp("store", None, ("x",), ("Y",)))
    p = Pipeline("table", tensors, (Stage.of("s", ops),))
    written = plain(p)
    want = min(rows, 500) * 64 + rows * (8 + 64)
    assert mesh_traffic(written, sizes_at(written, rows))["dram"] == traffic(p, rows).dram == want


def block(placement: Shard) -> Pipeline:
    """linear, LayerNorm, linear."""
    tensors = (
        Tensor.of("X", Role.INPUT, (16,), "bf16"),
        Tensor.of("W", Role.PARAMETER, (24, 16), "bf16"),
        Tensor.of("V", Role.PARAMETER, (8, 24), "bf16"),
        Tensor.of("Y", Role.OUTPUT, (8,), "bf16"),
    )
    ops = (
        TileOp("load", Tile.of("x", 16, "bf16"), (), ("X",)),
        TileOp("linear", Tile.of("h", 24, "bf16"), ("x",), ("W",)),
        TileOp("layer_norm", Tile.of("n", 24, "bf16"), ("h",), (), (("eps", 1e-5), ("affine", ""))),
        TileOp("linear", Tile.of("y", 8, "bf16"), ("n",), ("V",)),
        TileOp("store", None, ("y",), ("Y",)),
    )
    return Pipeline("block", tensors, (Stage.of("s", ops, 3, placement),))


def test_what_warpgroups_exchange_follows_from_the_mesh() -> None:
    """By rows nothing moves; by columns the operand of a product is gathered, and row sums are summed over both."""
    assert exchanges(plain(block(Shard(0))).stages[0]) == []
    found = exchanges(plain(block(Shard(1))).stages[0])
    assert {(e.how, e.level) for e in found} == {("all-gather", Level.WARPGROUP), ("all-reduce", Level.WARPGROUP)}
    assert [e.tile for e in found if e.how == "all-gather"] == ["n"]

"""Pipelines of any axes in the simulator: amounts by formula, row pipelines as the fitted model has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import chain

from tilestream.devices import get
from tilestream.errors import DeviceError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Queue, Stage, Transport
from tilestream.ir.read import axes, program, tensors
from tilestream.options import Options
from tilestream.plan.planner import plan
from tilestream.simulator.from_axes import mesh_workload
from tilestream.simulator.from_pipeline import workload
from tilestream.simulator.run import run

H200 = get("h200")
NAMES = axes("rows k=768 hid=3072 out=768")
KINDS = tensors("X[rows,k] W1[hid,k] W2[out,hid] >Y[rows,out]", NAMES)
FFN = program(
    """
    x[rows,k] = load X[rows,k]
    a[rows,hid] = product x W1[hid,k]
    h[rows,hid] = relu a
    y[rows,out] = product h W2[out,hid]
    y -> Y[rows,out]
    """,
    NAMES,
)


def ffn(loops, *mesh: Spread) -> Pipeline:
    return Pipeline("ffn", KINDS, (Stage("s", FFN, loops, mesh),))


MANY = ffn(
    (Loop("rows", 64), Loop("hid", 128)), Spread(Level.GRID, 132, ("rows",)), Spread(Level.WARPGROUP, 2, ("rows",))
)
FEW = ffn((Loop("hid", 64),), Spread(Level.GRID, 8, ("hid",)), Spread(Level.CLUSTER, 4, ("out", "hid")))


@pytest.mark.parametrize(("p", "rows"), [(MANY, 131_072), (FEW, 128)])
def test_work_is_that_of_the_formulas(p: Pipeline, rows: int) -> None:
    (launch,) = mesh_workload(p, {"rows": rows}, H200).launches
    (stage,) = launch.stages
    assert stage.work.tensor_flops * stage.tiles == pytest.approx(2 * rows * 2 * 768 * 3072)
    assert stage.work.dram_read * stage.tiles == pytest.approx((rows * 768 + 2 * 768 * 3072) * 2)
    assert stage.work.dram_write * stage.tiles == pytest.approx(rows * 768 * 2)
    time_s = run(workload(p, rows, H200), H200).time_s
    assert time_s >= stage.work.tensor_flops * stage.tiles / H200.tensor_flops["bf16"]
    assert time_s >= (stage.work.dram_read + stage.work.dram_write) * stage.tiles / H200.dram_bytes_per_s


def test_exchanges_take_time_and_clusters_must_exist() -> None:
    slow = replace(H200, name="slow", dsm_bytes_per_s=H200.dsm_bytes_per_s / 100)
    assert (
        run(mesh_workload(FEW, {"rows": 128}, slow), slow).time_s
        > run(mesh_workload(FEW, {"rows": 128}, H200), H200).time_s
    )
    with pytest.raises(DeviceError, match="cluster of 4 CTAs, and a100 has none of more than 1"):
        mesh_workload(FEW, {"rows": 128}, get("a100"))


def test_a_dram_queue_ends_a_launch() -> None:
    up = Stage("up", FFN[:3], (Loop("rows", 64),), (Spread(Level.GRID, 132, ("rows",)),))
    down = Stage("down", FFN[3:], (Loop("rows", 64),), (Spread(Level.GRID, 132, ("rows",)),))
    p = Pipeline("bulk", KINDS, (up, down), (Queue("h", "up", ("down",), Transport.DRAM, 0),))
    first, second = mesh_workload(p, {"rows": 4096}, H200).launches
    middle = 4096 * 3072 * 2
    assert first.stages[0].work.dram_write * first.stages[0].tiles == pytest.approx(middle)
    assert second.stages[0].work.dram_read * second.stages[0].tiles == pytest.approx(middle + 3072 * 768 * 2)


@pytest.mark.parametrize(
    ("layers", "width", "strategy"), [(8, 256, "vertical"), (4, 128, "vertical"), (8, 256, "spatial")]
)
def test_row_pipelines_are_near_the_model_that_was_fitted(layers: int, width: int, strategy: str) -> None:
    """Nothing of this one is fitted, and it knows no epilogue that waits: at most so much faster, and hardly slower."""
    found = plan(chain(layers, width), 65_536, H200, Options(strategy=strategy)).chosen.pipeline
    assert found is not None
    fitted = run(workload(found, 65_536, H200), H200).time_s
    counted = run(mesh_workload(found, {"rows": 65_536}, H200), H200).time_s
    assert 0.6 * fitted < counted < 1.25 * fitted

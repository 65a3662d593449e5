"""Pipelines of any axes in the simulator: amounts by formula, row pipelines as the fitted model has them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from programs import chain

from tilestream.devices import get
from tilestream.errors import DeviceError, InputError, VerifyError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.pipeline import Pipeline, Queue, Stage, Transport
from tilestream.ir.read import axes, program, tensors
from tilestream.ir.verify import verify
from tilestream.options import Options
from tilestream.plan.planner import plan
from tilestream.simulator import simulate
from tilestream.simulator.from_axes import mesh_workload
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
    time_s = run(mesh_workload(p, {"rows": rows}, H200), H200).time_s
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


def test_rings_hold_as_many_bytes_as_the_pipeline_says() -> None:
    """Of a ring of seven tiles of 64 rows; its producers make steps of 4 x 64."""
    ends = (
        Stage("up", FFN[:3], (Loop("rows", 64),), (Spread(Level.GRID, 4, ("rows",)), Spread(Level.GRID, 2, ("hid",)))),
    )
    ends += (Stage("down", FFN[3:], (Loop("rows", 64),), (Spread(Level.GRID, 3, ("rows",)),)),)
    p = Pipeline("two", KINDS, ends, (Queue("h", "up", ("down",), depth=7),))
    (launch,) = mesh_workload(p, {"rows": 64 * 12}, H200).launches
    (ring,) = launch.queues
    assert ring.room is not None and ring.room * ring.payload == 7 * 64 * 3072 * 2


@pytest.mark.parametrize(
    ("layers", "width", "strategy"), [(8, 256, "vertical"), (4, 128, "vertical"), (8, 256, "spatial")]
)
def test_row_pipelines_are_near_the_model_that_was_fitted(layers: int, width: int, strategy: str) -> None:
    """Nothing of this one is fitted, and it knows no epilogue that waits: at most so much faster, and hardly slower."""
    found = plan(chain(layers, width), 65_536, H200, Options(strategy=strategy)).chosen.pipeline
    assert found is not None
    fitted = simulate(found, 65_536, H200, spans=False).time_us * 1e-6
    counted = run(mesh_workload(found, {"rows": 65_536}, H200), H200).time_s
    assert 0.6 * fitted < counted < 1.25 * fitted


# -- rows by an index

GRAPH = axes("edges nodes c=64 f=128")
MESSAGES = Pipeline(
    "messages",
    tensors("V[nodes,c] senders[edges]:i64 receivers[edges]:i64 W[f,c] >M[nodes,f]:f32", GRAPH),
    (
        Stage(
            "s",
            program(
                """
                s[edges,c] = load V[senders[edges],c]
                m[edges,f] = product s W[f,c]
                m +> M[receivers[edges],f]
                """,
                GRAPH,
            ),
            (Loop("edges", 64),),
            (Spread(Level.GRID, 132, ("edges",)),),
        ),
    ),
)


def totals(nodes: int, edges: int) -> dict[str, float]:
    (launch,) = mesh_workload(MESSAGES, {"nodes": nodes, "edges": edges}, H200).launches
    (stage,) = launch.stages
    fields = ("l2_read", "l2_write", "l2_shared_read", "dram_read", "dram_write")
    return {name: getattr(stage.work, name) * stage.tiles for name in fields}


def test_rows_by_an_index_that_the_l2_holds_come_once() -> None:
    nodes, edges = 10_000, 400_000
    found = totals(nodes, edges)
    indices, table, rows = 2 * 8 * edges, 2 * nodes * 64, 2 * edges * 64
    assert found["l2_read"] == pytest.approx(rows + indices + 2 * 64 * 128)
    assert found["l2_write"] == 4 * edges * 128  # an addition an element of each edge
    assert found["dram_read"] == pytest.approx(table + indices + 2 * 64 * 128, rel=1e-3)  # no node without an edge
    assert found["dram_write"] == 4 * nodes * 128
    moved = mesh_traffic(MESSAGES, MESSAGES.sizes() | {"nodes": nodes, "edges": edges})
    assert moved["l2"] == pytest.approx(found["l2_read"] + found["l2_shared_read"] + found["l2_write"])


def test_a_table_that_the_l2_does_not_hold_comes_again() -> None:
    nodes, edges = 4_000_000, 8_000_000
    found = totals(nodes, edges)
    table, rows, weights = 2 * nodes * 64, 2 * edges * 64, 2 * 64 * 128
    first = table * (1 - (1 - 1 / nodes) ** edges)
    kept = 0.5 * H200.l2_bytes / table
    sums = 4 * nodes * 128
    late = (4 * edges * 128 - sums * (1 - (1 - 1 / nodes) ** edges)) * (1 - 0.5 * H200.l2_bytes / sums)
    assert found["dram_read"] == pytest.approx(first + (rows - first) * (1 - kept) + late + 16 * edges + weights)
    assert found["dram_write"] == pytest.approx(sums + late)
    few = totals(nodes, 1000)
    assert few["dram_read"] == pytest.approx(2 * 1000 * 64 + weights + 16 * 1000, rel=0.01)  # what is touched


def test_more_edges_take_longer_and_a_size_that_is_not_known_is_told() -> None:
    times = [simulate(MESSAGES, {"nodes": 10_000, "edges": n}, H200) for n in (20_000, 200_000, 2_000_000)]
    assert times[0].time_us < times[1].time_us < times[2].time_us
    assert times[2].bytes == mesh_traffic(MESSAGES, MESSAGES.sizes() | {"nodes": 10_000, "edges": 2_000_000})
    assert 0 < times[2].utilisation["s"] <= 1
    with pytest.raises(InputError, match="the size of edges, nodes is read at the call"):
        simulate(MESSAGES, 64, H200)


# -- every kind


@pytest.mark.parametrize("seed", range(40))
def test_what_the_verifier_accepts_is_simulated(seed: int) -> None:
    rng = random.Random(seed)
    tiles = {"rows": 64, "k": 64, "hid": 128, "out": 96}
    loops = tuple(Loop(a, tiles[a]) for a in rng.sample(sorted(tiles), rng.randint(0, 3)))
    levels = rng.sample((Level.GRID, Level.CLUSTER, Level.WARPGROUP), rng.randint(1, 3))
    p = ffn(loops, *(Spread(x, 2, tuple(rng.sample(sorted(tiles), rng.randint(1, 3)))) for x in levels))
    try:
        verify(p)
    except VerifyError:
        return
    for split in (p, two(p)):
        found = simulate(split, 512, H200)
        assert found.time_us > 0 and found.bytes["dram"] > 0, split


def two(p: Pipeline) -> Pipeline:
    """Its stage in two, a launch each."""
    (whole,) = p.stages
    parts = (replace(whole, name="up", ops=whole.ops[:3]), replace(whole, name="down", ops=whole.ops[3:]))
    made = tuple(replace(s, loops=tuple(x for x in s.loops if _has(s, x.axis)), mesh=_over(s)) for s in parts)
    return replace(p, stages=made, queues=(Queue("h", "up", ("down",), Transport.DRAM, 0),))


def _has(s: Stage, axis: str) -> bool:
    return any(axis in op.mentions for op in s.ops)


def _over(s: Stage) -> tuple[Spread, ...]:
    return tuple(d for d in s.mesh if any(_has(s, a) for a in d.axes))

"""Pipelines that together use every part of the kernels, by name; and programs cut into stages by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from mixed_programs import ONE_STAGE, residual_stream
from programs import Program, chain, edge_block, elementwise, nerf, slopes

from tilestream import devices
from tilestream.ir.pipeline import Pipeline, Queue, Residency, Shard, Stage, TileOp, Transport
from tilestream.plan.passes.cuts import split_columns

SMS = 132


def one_stage(
    program: Pipeline, placement: int = 0, residency: Residency = Residency.STREAMED, **changes: int
) -> Pipeline:
    """The whole program on every SM."""
    stage = program.stages[0].with_(replicas=SMS, placement=Shard(placement), residency=residency, **changes)
    return program.with_stages((stage,))


def spread(
    program: Pipeline,
    layers: int = 1,
    replicas: int = 4,
    steps: int = 2,
    placements: tuple[int, ...] = (0,),
    residency: Residency = Residency.RESIDENT,
    launches: Collection[int] = (),
) -> Pipeline:
    """A stage for every ``layers`` linears, joined by queues: multicast and skip queues where tiles are used again.

    Args:
        program: one stage with all ops.
        layers: linears a stage.
        replicas: of every stage.
        steps: how many steps of all replicas a ring holds.
        placements: of the stages in turn.
        residency: of every stage.
        launches: indices of the stages that begin a new launch; tiles go through DRAM to them.
    """
    groups = _groups(program.stages[0].ops, layers)
    stages = tuple(
        Stage.of(f"s{k}", tuple(ops), replicas, Shard(placements[k % len(placements)]), residency)
        for k, ops in enumerate(groups)
    )
    launch_of = [sum(first <= k for first in launches) for k in range(len(stages))]
    queues = []
    for k, stage in enumerate(stages):
        for name, tile in stage.defined().items():
            takers = [c for c, s in enumerate(stages) if name in s.taken()]
            near = tuple(f"s{c}" for c in takers if launch_of[c] == launch_of[k])
            far = tuple(f"s{c}" for c in takers if launch_of[c] != launch_of[k])
            line = next(op.source for op in stage.ops if op.out == tile)
            if near:
                queues.append(Queue(name, f"s{k}", near, Transport.L2, 2 * replicas * steps, line))
            if far:
                queues.append(Queue(name, f"s{k}", far, Transport.DRAM, 0, line))
    strategy = "bulk" if len(launches) == len(stages) - 1 else "spatial"
    return replace(program, stages=stages, queues=tuple(queues), strategy=strategy)


def _groups(ops: tuple[TileOp, ...], layers: int) -> list[list[TileOp]]:
    """A new group at every ``layers``-th linear, with the cat that feeds it."""
    groups: list[list[TileOp]] = [[]]
    linears = 0
    for op in ops:
        if op.kind == "linear":
            if linears and linears % layers == 0:
                feeds: list[TileOp] = []
                while groups[-1][-1].kind == "cat" and groups[-1][-1].out is not None:
                    if groups[-1][-1].out.name not in op.ins:
                        break
                    feeds.insert(0, groups[-1].pop())
                groups.append(feeds)
            linears += 1
        groups[-1].append(op)
    return groups


def odd_widths(dtype: str = "bf16") -> Pipeline:
    """Widths that no vector instruction likes, every kind of activation, an output of one feature."""
    p = Program("odd", dtype)
    h = p.load("x", 5)
    acts = ("gelu", "silu", "tanh", "sigmoid", "softplus", "gelu_tanh", "sin", "relu")
    for width, act in zip((129, 1, 33, 255, 63, 200, 7, 131), acts, strict=True):
        h = p.linear(h, width, act)
    p.store(p.linear(h, 1))
    return p.build()


def reductions(dtype: str = "bf16") -> Pipeline:
    """Norms, softmax, rows' sums, columns that broadcast, slices, scalars, and six outputs."""
    p = Program("reductions", dtype)
    x, y = p.load("x", 72), p.load("y", 72)
    h = p.linear(x, 72)
    p.store(p.op("softmax", 72, h))
    p.store(p.op("rms_norm", 72, p.op("add", 72, h, y), eps=1e-6))
    centred = p.op("sub", 72, h, p.op("mean", 1, h))
    p.store(p.op("mul", 72, centred, p.op("sigmoid", 1, p.op("max", 1, y))))
    p.store(p.op("sum", 1, p.op("square", 72, h)))
    left = p.op("slice", 24, h, start=0, stop=24)
    right = p.op("slice", 24, h, start=48, stop=72)
    p.store(p.op("div", 24, left, p.op("add", 24, p.op("abs", 24, right), scalar=1.0)))
    p.store(p.op("sub", 72, p.op("maximum", 72, h, y), scalar=2.0, reversed=1))
    return p.build()


def heads(dtype: str = "bf16") -> Pipeline:
    """A trunk that two heads and an output share."""
    p = Program("heads", dtype)
    trunk = p.linear(p.load("x", 100), 192, "silu")
    p.store(trunk)
    p.store(p.linear(p.linear(trunk, 64, "relu"), 10))
    p.store(p.op("softmax", 17, p.linear(trunk, 17)))
    return p.build()


def ladder(layers: int = 4, width: int = 96) -> Pipeline:
    """Every layer adds the input again: one tile that many stages take."""
    p = Program("ladder")
    x = p.load("x", width)
    h = x
    for _ in range(layers):
        h = p.op("add", width, p.linear(h, width, "relu"), x)
    p.store(h)
    return p.build()


def wide(outs: int = 511) -> Pipeline:
    """More than one warpgroup's columns, with a norm across both."""
    p = Program("wide")
    h = p.linear(p.load("x", 130), outs, "silu")
    p.store(p.layer_norm(p.linear(h, 300)))
    return p.build()


def views(*slices: tuple[int, int], width: int = 379) -> Pipeline:
    """Slices of a computed tile: what pads them lies past the end of the memory that holds the tile."""
    p = Program("views")
    h = p.op("relu", width, p.load("x", width))
    p.store(h)
    for start, stop in slices:
        p.store(p.op("sigmoid", stop - start, p.op("slice", stop - start, h, start=start, stop=stop)))
    return p.build()


def parted(program: Pipeline, columns: int, placement: int, replicas: int = 3, steps: int = 2) -> Pipeline:
    """Layers by columns, each part on SMs of its own."""
    made = split_columns(program, devices.get("h200"), columns)
    return made.with_stages(
        tuple(
            s.with_(replicas=replicas, placement=Shard(placement), residency=Residency.RESIDENT) for s in made.stages
        ),
        tuple(replace(q, depth=2 * replicas * steps) for q in made.queues),
    )


def _on_every_sm(make: Callable[[], Pipeline]) -> Pipeline:
    program = make()
    return one_stage(program, program.stages[0].placement.dim)


STREAMED = Residency.STREAMED

NAMED: dict[str, Callable[[], Pipeline]] = {
    "chain": lambda: one_stage(chain(8)),
    "chain_f16_no_bias": lambda: one_stage(chain(3, 96, "silu", "f16", bias=False)),
    "chain_tf32": lambda: one_stage(chain(3, 64, "gelu", "f32")),
    "chain_resident": lambda: one_stage(chain(2, 128), residency=Residency.RESIDENT),
    "odd_widths": lambda: one_stage(odd_widths()),
    "odd_widths_f16": lambda: one_stage(odd_widths("f16")),
    "nerf": lambda: one_stage(nerf()),
    "edge_block": lambda: one_stage(edge_block()),
    "edge_block_512": lambda: one_stage(edge_block(512, 2, "silu"), placement=1),
    "wide": lambda: one_stage(wide(), placement=1),
    "narrow_by_columns": lambda: one_stage(odd_widths(), placement=1),
    "chain_pairs": lambda: one_stage(chain(8), group=2),
    "edge_block_pairs": lambda: one_stage(edge_block(), group=2),
    "wide_pairs": lambda: one_stage(wide(), placement=1, group=2),
    "odd_widths_pairs_f16": lambda: one_stage(odd_widths("f16"), group=2),
    "nerf_one_in_flight": lambda: one_stage(nerf(), in_flight=1),
    "edge_block_512_one_in_flight": lambda: one_stage(edge_block(512, 2, "silu"), placement=1, in_flight=1),
    "wide_one_in_flight": lambda: one_stage(wide(), placement=1, in_flight=1),
    "views": lambda: one_stage(views((3, 64), (1, 64), (8, 63), (40, 57), width=64)),
    "views_by_columns": lambda: one_stage(views((71, 350), (72, 351), (192, 379)), placement=1),
    "elementwise": lambda: one_stage(elementwise()),
    "reductions": lambda: one_stage(reductions()),
    "heads": lambda: one_stage(heads()),
    "derivatives": lambda: one_stage(slopes(4)),
    "derivatives_by_columns": lambda: one_stage(slopes(4, "gelu_slope"), placement=1),
    "derivatives_f16": lambda: one_stage(slopes(4, "tanh", 200, "f16")),
    "derivatives_tf32": lambda: one_stage(slopes(2, width=72, dtype="f32")),
    "spatial_chain": lambda: spread(chain(8), replicas=16),
    "spatial_chain_tight": lambda: spread(chain(4, 64), replicas=2, steps=1),
    "spatial_hybrid": lambda: spread(chain(8, 128), layers=2, replicas=33, residency=STREAMED),
    "spatial_nerf": lambda: spread(nerf(), layers=4, replicas=7, residency=STREAMED),
    "spatial_multicast": lambda: spread(ladder(), replicas=3),
    "spatial_heads_f16": lambda: spread(heads("f16"), replicas=5, steps=1),
    "spatial_mixed_placements": lambda: spread(ladder(3, 200), replicas=4, placements=(0, 1), residency=STREAMED),
    "spatial_by_columns": lambda: spread(wide(512), replicas=6, steps=1, placements=(1,), residency=STREAMED),
    "spatial_edge_block": lambda: spread(edge_block(), replicas=8),
    "layers_by_columns": lambda: parted(chain(4, 512), 128, 1),
    "layers_by_columns_f16": lambda: parted(chain(3, 320, "silu", "f16"), 64, 0, replicas=2),
    "layers_by_columns_ladder": lambda: parted(ladder(3, 200), 64, 1, steps=1),
    "bulk_chain": lambda: spread(chain(3, 192), replicas=SMS, residency=STREAMED, launches=(1, 2)),
    "bulk_odd_f16": lambda: spread(odd_widths("f16"), layers=3, replicas=SMS, residency=STREAMED, launches=(1, 2)),
    "l2_and_dram": lambda: spread(ladder(4, 64), replicas=5, launches=(2,)),
    "spatial_mixed_dtypes": lambda: spread(residual_stream(3, 64), replicas=3, steps=1),
    "spatial_mixed_dtypes_by_columns": lambda: spread(
        residual_stream(2, 200, "f16"), replicas=4, placements=(1, 0), residency=STREAMED
    ),
    "bulk_mixed_dtypes": lambda: spread(residual_stream(2, 72), replicas=SMS, residency=STREAMED, launches=(1,)),
} | {f"mixed_{name}": partial(_on_every_sm, make) for name, make in ONE_STAGE.items()}

"""Small pipelines made by hand for the tests of reports: one network as bulk, vertical and spatial."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Queue, Residency, Role, Stage, Tensor, Tile, TileOp, Transport

WIDTH = 64


def tensors(layers: int) -> tuple[Tensor, ...]:
    weights = [Tensor.of(f"w{i}", Role.PARAMETER, (WIDTH, WIDTH), "bf16") for i in range(layers)]
    ends = (Tensor.of("x", Role.INPUT, (WIDTH,), "bf16"), Tensor.of("y", Role.OUTPUT, (WIDTH,), "bf16"))
    return (*ends, *weights)


def _layer(i: int) -> tuple[TileOp, ...]:
    where = f"model.py:{10 + i} in forward: h = relu(layer{i}(h))"
    return (
        TileOp("linear", Tile.of(f"z{i}", WIDTH, "bf16"), (f"h{i}",), (f"w{i}",), (), where),
        TileOp("relu", Tile.of(f"h{i + 1}", WIDTH, "bf16"), (f"z{i}",), (), (), where),
    )


def vertical(layers: int = 4) -> Pipeline:
    """Every layer in one stage, with a residual from its input."""
    ops = [TileOp("load", Tile.of("h0", WIDTH, "bf16"), (), ("x",))]
    for i in range(layers):
        ops += _layer(i)
    ops.append(TileOp("add", Tile.of("r", WIDTH, "bf16"), (f"h{layers}", "h0")))
    ops.append(TileOp("store", None, ("r",), ("y",)))
    return Pipeline("net", tensors(layers), (Stage.of("all", tuple(ops), replicas=132),), (), "vertical")


def spatial(layers: int = 4, transport: Transport = Transport.L2) -> Pipeline:
    """A layer a stage; the input goes to the first stage and, past the others, to the last."""
    stages, queues = [], []
    for i in range(layers):
        ops = list(_layer(i))
        if i == 0:
            ops.insert(0, TileOp("load", Tile.of("h0", WIDTH, "bf16"), (), ("x",)))
        if i == layers - 1:
            ops.append(TileOp("add", Tile.of("r", WIDTH, "bf16"), (f"h{layers}", "h0")))
            ops.append(TileOp("store", None, ("r",), ("y",)))
        stages.append(Stage.of(f"layer{i}", tuple(ops), replicas=4, residency=Residency.RESIDENT))
        if i > 0:
            queues.append(
                Queue(f"h{i}", f"layer{i - 1}", (f"layer{i}",), transport, 16 if transport is Transport.L2 else 0)
            )
    queues.append(Queue("h0", "layer0", (f"layer{layers - 1}",), transport, 64 if transport is Transport.L2 else 0))
    return Pipeline("net", tensors(layers), tuple(stages), tuple(queues), "spatial")


def bulk(layers: int = 4) -> Pipeline:
    return replace(spatial(layers, Transport.DRAM), strategy="bulk")

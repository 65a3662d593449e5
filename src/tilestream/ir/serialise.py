"""Pipelines and plans as JSON and back, exactly. No pickle: a cache file can be read, and cannot run code."""

from __future__ import annotations

import math
from typing import Any

from tilestream.errors import CacheError, IRError
from tilestream.ir.pipeline import Pipeline, Queue, Residency, Role, Shard, Stage, Tensor, Tile, TileOp, Transport

FORMAT = 2  # 1 had neither groups nor products in flight; it is still read


def pipeline_to_json(p: Pipeline, sources: bool = True) -> dict[str, Any]:
    """A tree of dicts, lists, strings and numbers that ``pipeline_from_json`` turns back into an equal pipeline.

    Without ``sources``, the user's lines, equal pipelines have equal trees.
    """
    return {
        "format": FORMAT,
        "name": p.name,
        "strategy": p.strategy,
        "tensors": [[t.name, t.role.value, list(t.shape), t.dtype] for t in p.tensors],
        "stages": [
            {
                "name": s.name,
                "replicas": s.replicas,
                "shard": s.placement.dim,
                "residency": s.residency.value,
                "group": s.group,
                "in_flight": s.in_flight,
                "ops": [_op_to_json(op, sources) for op in s.ops],
            }
            for s in p.stages
        ],
        "queues": [
            {
                "tile": q.tile,
                "producer": q.producer,
                "consumers": list(q.consumers),
                "transport": q.transport.value,
                "depth": q.depth,
                "source": q.source if sources else "",
            }
            for q in p.queues
        ],
    }


def pipeline_from_json(data: Any) -> Pipeline:
    """The pipeline that ``data`` describes, checked as any other.

    Raises:
        CacheError: the data is not what ``pipeline_to_json`` writes, or is of another format.
    """
    try:
        if data["format"] not in (1, FORMAT):
            raise CacheError(f"pipeline data of format {data['format']!r}, not {FORMAT}", "write it again")
        return Pipeline(
            data["name"],
            tuple(Tensor(name, Role(role), tuple(shape), dtype) for name, role, shape, dtype in data["tensors"]),
            tuple(
                Stage(
                    s["name"],
                    tuple(_op_from_json(op) for op in s["ops"]),
                    s["replicas"],
                    Shard(s["shard"]),
                    Residency(s["residency"]),
                    s.get("group", 1),
                    s.get("in_flight", 2),
                )
                for s in data["stages"]
            ),
            tuple(
                Queue(
                    q["tile"], q["producer"], tuple(q["consumers"]), Transport(q["transport"]), q["depth"], q["source"]
                )
                for q in data["queues"]
            ),
            data["strategy"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, IRError) as error:
        raise CacheError(f"not a pipeline: {error!r}", "write it again") from error


def _op_to_json(op: TileOp, sources: bool) -> dict[str, Any]:
    return {
        "kind": op.kind,
        "out": None if op.out is None else [op.out.name, op.out.features, op.out.dtype],
        "ins": list(op.ins),
        "params": list(op.params),
        "attrs": [[name, _number_to_json(value)] for name, value in op.attrs],
        "source": op.source if sources else "",
    }


def _op_from_json(data: dict[str, Any]) -> TileOp:
    return TileOp(
        data["kind"],
        None if data["out"] is None else Tile(*data["out"]),
        tuple(data["ins"]),
        tuple(data["params"]),
        tuple((name, _number_from_json(value)) for name, value in data["attrs"]),
        data["source"],
    )


def _number_to_json(value: float | int | str) -> Any:
    """JSON has no infinities and no NaN: those become ``{"float": "inf"}``."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _number_from_json(value: Any) -> float | int | str:
    return float(value["float"]) if isinstance(value, dict) else value

"""Pipelines and plans as JSON and back, exactly. No pickle: a cache file can be read, and cannot run code."""

from __future__ import annotations

import math
from typing import Any

from tilestream.errors import CacheError, IRError
from tilestream.ir.axes import At, Axis, Level, Loop, Spread, View
from tilestream.ir.pipeline import Pipeline, Queue, Role, Stage, Tensor, Tile, TileOp, Transport

FORMAT = 3


def pipeline_to_json(p: Pipeline, sources: bool = True) -> dict[str, Any]:
    """A tree of dicts, lists, strings and numbers that ``pipeline_from_json`` turns back into an equal pipeline.

    Without ``sources``, the user's lines, equal pipelines have equal trees.
    """
    return {
        "format": FORMAT,
        "name": p.name,
        "strategy": p.strategy,
        "tensors": [[t.name, t.role.value, _axes_to_json(t.axes), t.dtype] for t in p.tensors],
        "stages": [
            {
                "name": s.name,
                "loops": [[loop.axis, loop.tile, *[True] * loop.held] for loop in s.loops],
                "mesh": [[d.level.value, d.size, list(d.axes)] for d in s.mesh],
                "resident": list(s.resident),
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
        if data["format"] != FORMAT:
            raise CacheError(f"pipeline data of format {data['format']!r}, not {FORMAT}", "write it again")
        return Pipeline(
            data["name"],
            tuple(
                Tensor(name, Role(role), _axes_from_json(axes), dtype) for name, role, axes, dtype in data["tensors"]
            ),
            tuple(
                Stage(
                    s["name"],
                    tuple(_op_from_json(op) for op in s["ops"]),
                    tuple(Loop(*loop) for loop in s["loops"]),
                    tuple(Spread(Level(level), size, tuple(axes)) for level, size, axes in s["mesh"]),
                    tuple(s["resident"]),
                    s["in_flight"],
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
        "out": None if op.out is None else [op.out.name, _axes_to_json(op.out.axes), op.out.dtype],
        "tiles": [_view_to_json(v) for v in op.tiles],
        "tensors": [_view_to_json(v) for v in op.tensors],
        "combine": op.combine,
        "attrs": [[name, _number_to_json(value)] for name, value in op.attrs],
        "source": op.source if sources else "",
    }


def _op_from_json(data: dict[str, Any]) -> TileOp:
    return TileOp(
        data["kind"],
        None if data["out"] is None else Tile(data["out"][0], _axes_from_json(data["out"][1]), data["out"][2]),
        tuple(_view_from_json(v) for v in data["tiles"]),
        tuple(_view_from_json(v) for v in data["tensors"]),
        tuple((name, _number_from_json(value)) for name, value in data["attrs"]),
        data["source"],
        data["combine"],
    )


def _axes_to_json(axes: tuple[Axis, ...]) -> list[list[Any]]:
    return [[a.name, a.size] for a in axes]


def _axes_from_json(data: Any) -> tuple[Axis, ...]:
    return tuple(Axis(name, size) for name, size in data)


def _view_to_json(view: View | str) -> Any:
    """A name alone stays one."""
    if isinstance(view, str):
        return view
    at = view.at and [
        [list(c.axes), c.offset, c.index, list(c.strides), *([c.over, c.within] if c.part("") else [])] for c in view.at
    ]
    return [view.of, at]


def _view_from_json(data: Any) -> View | str:
    if isinstance(data, str):
        return data
    name, at = data
    return View(
        name,
        None
        if at is None
        else tuple(At(tuple(a), offset, index, tuple(s), *part) for a, offset, index, s, *part in at),
    )


def _number_to_json(value: float | int | str) -> Any:
    """JSON has no infinities and no NaN: those become ``{"float": "inf"}``."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _number_from_json(value: Any) -> float | int | str:
    return float(value["float"]) if isinstance(value, dict) else value

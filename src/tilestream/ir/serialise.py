"""Pipelines and plans as JSON and back, exactly. No pickle: a cache file can be read, and cannot run code.

The classes of the IR say all: pipelines, stages, queues and ops are objects by the names of their fields, the small
things in them (tensors, axes, views) are lists in the order of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from tilestream.errors import CacheError, IRError
from tilestream.ir.pipeline import Pipeline, Queue, Stage, TileOp

FORMAT = 3

NAMED = (Pipeline, Stage, Queue, TileOp)

RARE = {"held": False, "over": 1, "within": 0}
"""Last fields of lists that are left out where they have these values."""


def pipeline_to_json(p: Pipeline, sources: bool = True) -> dict[str, Any]:
    """A tree of dicts, lists, strings and numbers that ``pipeline_from_json`` turns back into an equal pipeline.

    Without ``sources``, the user's lines, equal pipelines have equal trees.
    """
    return {"format": FORMAT, **_to_json(p, sources)}


def pipeline_from_json(data: Any) -> Pipeline:
    """The pipeline that ``data`` describes, checked as any other.

    Raises:
        CacheError: the data is not what ``pipeline_to_json`` writes, or is of another format.
    """
    try:
        if data["format"] != FORMAT:
            raise CacheError(f"pipeline data of format {data['format']!r}, not {FORMAT}", "write it again")
        return _from_json(data, Pipeline)
    except (KeyError, TypeError, ValueError, AttributeError, IRError) as error:
        raise CacheError(f"not a pipeline: {error!r}", "write it again") from error


def _to_json(value: Any, sources: bool) -> Any:
    """JSON has no infinities and no NaN: those become ``{"float": "inf"}``."""
    if isinstance(value, tuple):
        return [_to_json(v, sources) for v in value]
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if not is_dataclass(value):
        return value
    made = {name: _to_json(getattr(value, name), sources) for name in _fields(type(value))}
    if isinstance(value, NAMED):
        return made if sources or "source" not in made else {**made, "source": ""}
    while made and made[last := next(reversed(made))] == RARE.get(last, ()):
        del made[last]
    return list(made.values())


def _from_json(data: Any, kind: Any) -> Any:
    """What ``data`` is as a value of type ``kind``: a class, ``tuple[...]``, or one of several of them."""
    if get_origin(kind) is tuple:
        of = get_args(kind)
        each = of[:1] * len(data) if of[-1] is Ellipsis else of
        return tuple(_from_json(x, k) for x, k in zip(data, each, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        known = _fields(kind)
        if isinstance(data, Mapping):
            data = [data[name] for name in known]
        return kind(*(_from_json(x, k) for x, k in zip(data, [*known.values()][: len(data)], strict=True)))
    if isinstance(data, dict):
        return float(data["float"])
    if isinstance(data, list):  # of several types the one that is neither text nor a number
        return _from_json(data, next(k for k in get_args(kind) if k not in (str, int, float, type(None))))
    return kind(data) if isinstance(kind, type) and issubclass(kind, StrEnum) else data


@cache
def _fields(of: type) -> dict[str, Any]:
    """Names and types of the fields of a dataclass."""
    hints = get_type_hints(of)
    return {f.name: hints[f.name] for f in fields(of)}

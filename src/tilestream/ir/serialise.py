"""Pipelines and plans as JSON and back, exactly. No pickle: a cache file can be read, and cannot run code.

The classes of the IR say all: pipelines, stages, queues and ops are objects by the names of their fields, the small
things in them (tensors, axes, views) are lists in the order of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from tilestream.errors import CacheError, IRError
from tilestream.ir.pipeline import Pipeline, Queue, Stage, TileOp

FORMAT = 3

NAMED = (Pipeline, Stage, Queue, TileOp)

RARE = {"held": False, "over": 1, "within": 0, "of": "", "bounds": "", "by_columns": False}
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
        return _reader(Pipeline)(data)
    except (KeyError, TypeError, ValueError, AttributeError, IRError) as error:
        raise CacheError(f"not a pipeline: {error!r}", "write it again") from error


def _to_json(value: Any, sources: bool) -> Any:
    """JSON has no infinities and no NaN: those become ``{"float": "inf"}``."""
    kind = type(value)
    if kind in (str, int):
        return value
    if kind is tuple:
        return [_to_json(v, sources) for v in value]
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if not is_dataclass(kind):
        return getattr(value, "value", value)  # of an enumeration
    made = {name: _to_json(getattr(value, name), sources) for name in _fields(kind)}
    if kind in NAMED:
        return made if sources or "source" not in made else {**made, "source": ""}
    while made and made[last := next(reversed(made))] == RARE.get(last, ()):
        del made[last]
    return list(made.values())


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value of type ``kind`` of its data: of a class, ``tuple[...]``, or one of several of them."""
    of = get_args(kind)
    if get_origin(kind) is tuple:
        if of[-1] is Ellipsis:
            one = _reader(of[0])
            return lambda data: tuple([one(x) for x in data])
        each = [_reader(k) for k in of]
        return lambda data: tuple([read(x) for read, x in zip(each, data, strict=True)])
    if is_dataclass(kind):
        return _object_reader(kind)
    if of:  # lists are of the one that is neither text nor a number
        other = next((_reader(k) for k in of if k not in (str, int, float, type(None))), None)
        return lambda data: other(data) if other and isinstance(data, list) else _number(data)
    return kind if issubclass(kind, StrEnum) else lambda data: data


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    readers = {name: _reader(hint) for name, hint in _fields(kind).items()}
    if kind in NAMED:
        return lambda data: kind(*[read(data[name]) for name, read in readers.items()])
    each = list(readers.values())
    return lambda data: kind(*[read(x) for read, x in zip(each[: len(data)], data, strict=True)])


def _number(data: Any) -> Any:
    return float(data["float"]) if isinstance(data, dict) else data


@cache
def _fields(of: type) -> dict[str, Any]:
    """Names and types of the fields of a dataclass."""
    hints = get_type_hints(of)
    return {f.name: hints[f.name] for f in fields(of)}

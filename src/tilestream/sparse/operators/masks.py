"""Truth values: comparisons, masks, and what is chosen by them.

A mask that comes from outside drops what it does not store: a sparse score then stays sparse. One that is computed is
ones and zeros like any other tensor, and chooses values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tilestream.sparse.operators.emptied import dropped, is_low
from tilestream.sparse.operators.registry import FACTORIES, OPERATORS, Lowering, NoLowering, operator
from tilestream.sparse.recorder import Condition, Recorder, View

_MINUS_INFINITY = -1e9
"""A fill at or below this is minus infinity where only a softmax reads it: its exponential is 0 beside any score
that is not so low itself."""

_SWAPPED = {"lt": "gt", "le": "ge"}


def _number(rec: Recorder, x: Any) -> Any:
    return rec.truth(x) if isinstance(x, Condition) else x


def _compared(op: str) -> Lowering:
    def lower(rec: Recorder, x: Any, y: Any) -> Condition:
        if op in ("eq", "ne") and isinstance(x, View) and not isinstance(y, View | Condition) and y == 0:
            return Condition(x, op == "ne")
        x, y = _number(rec, x), _number(rec, y)
        if isinstance(y, View):
            made = rec.binary(_SWAPPED[op], y, x) if op in _SWAPPED else rec.binary(op, x, y)
        else:
            made = rec.unary(op, x, "", float(y))
        return Condition(made, True)

    return lower


for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    OPERATORS[_name] = _compared(_name)
for _name, _same in (("greater", "gt"), ("greater_equal", "ge"), ("less", "lt"), ("less_equal", "le")):
    OPERATORS[_name] = _compared(_same)


@operator("isinf")
def _isinf(rec: Recorder, x: View) -> Condition:
    return Condition(rec.unary("eq", rec.unary("abs", x, "_size"), "", math.inf), True)


@operator("isnan")
def _isnan(rec: Recorder, x: View) -> Condition:
    return Condition(rec.binary("ne", x, x), True)


@operator("stored")
def _stored(rec: Recorder, x: View) -> Condition:
    declared = rec.inputs.get(x.tensor)
    sparse = declared is not None and declared.format is not None and "compressed" in declared.format.levels
    return Condition(x, True, zeros=sparse)


@operator("logical_not")
def negated(rec: Recorder, x: View | Condition) -> Condition:
    """What is true where ``x`` is not."""
    return Condition(x.view, not x.stored, x.zeros) if isinstance(x, Condition) else Condition(x, False)


@operator("logical_and")
def _and(rec: Recorder, x: Any, y: Any) -> Condition:
    return Condition(rec.binary("mul", _truth(rec, x), _truth(rec, y)), True)


@operator("logical_or")
def _or(rec: Recorder, x: Any, y: Any) -> Condition:
    return Condition(rec.binary("max", _truth(rec, x), _truth(rec, y)), True)


@operator("logical_xor")
def _xor(rec: Recorder, x: Any, y: Any) -> Condition:
    return Condition(rec.binary("ne", _truth(rec, x), _truth(rec, y)), True)


def _bitwise(name: str, lowering: Lowering) -> Lowering:
    """Of truth values, what the logical operator is; the bits of other numbers are not looked at."""

    def lower(rec: Recorder, *args: Any) -> Condition:
        if not all(isinstance(x, Condition | bool) for x in args):
            raise NoLowering(f"{name} of whole numbers", "compare them first: it is taken of truth values")
        return lowering(rec, *args)

    return lower


OPERATORS["bitwise_not"] = _bitwise("bitwise_not", negated)
for _names, _lowering in (("bitwise_and __and__", _and), ("bitwise_or __or__", _or), ("bitwise_xor __xor__", _xor)):
    OPERATORS |= {name: _bitwise(name, _lowering) for name in _names.split()}


@operator("any")
def _any(rec: Recorder, x: Any, dim: Any = None, keepdim: bool = False) -> Condition:
    found = _truth(rec, x)
    return Condition(rec.reduce(found, _all_dims(found, dim), keepdim, "max"), True)


@operator("all")
def _all(rec: Recorder, x: Any, dim: Any = None, keepdim: bool = False) -> Condition:
    found = rec.unary("eq", _truth(rec, x), "_not", 0.0)
    return Condition(rec.reduce(found, _all_dims(found, dim), keepdim, "max"), False)


def _all_dims(x: View, dim: Any) -> list[int]:
    return list(range(len(x.shape))) if dim is None else [dim] if isinstance(dim, int) else list(dim)


def _truth(rec: Recorder, x: Any) -> View:
    if not isinstance(x, View | Condition):
        return rec.known(torch.tensor(float(bool(x))), "_truth")
    return rec.truth(x if isinstance(x, Condition) else Condition(x, True))


def masked(rec: Recorder, x: View, keep: Condition, fill: float) -> View:
    """``x`` where ``keep`` holds, ``fill`` elsewhere."""
    lost = fill == -math.inf or (fill <= _MINUS_INFINITY and rec.into_softmax and not is_low(rec, x.tensor))
    # a mask of one element is always stored: it says nothing by that
    outside = keep.stored and rec.is_outside(keep.view.tensor) and bool(rec.shapes[keep.view.tensor])
    if outside and fill == 0:
        if not keep.zeros:
            rec.compress(keep.view.tensor)
        return rec.binary("mask", x, keep.view)
    if outside and lost and (made := dropped(rec, x, keep, fill)) is not None:
        return made
    if x.tensor in rec.dropped:
        earlier, before, filled = rec.dropped[x.tensor]
        x = _chosen(rec, earlier, before, filled, "_before")
    return _chosen(rec, x, keep, fill, "")


def _chosen(rec: Recorder, x: View, keep: Condition, fill: float, suffix: str) -> View:
    """The same with everything stored."""
    true = rec.truth(keep)
    made = rec.binary("keep", x, true, suffix if fill == 0 else f"{suffix}_kept")
    if fill == 0:
        return made
    rest = rec.unary("pick", rec.unary("eq", true, f"{suffix}_not", 0.0), f"{suffix}_fill", fill)
    return rec.binary("add", made, rest, suffix)


@operator("masked_fill")
def _masked_fill(rec: Recorder, x: View, condition: View | Condition, fill: Any) -> View:
    if isinstance(fill, View):
        return _where(rec, condition, fill, x)
    return masked(rec, _number(rec, x), negated(rec, condition), float(fill))


@operator("where")
def _where(rec: Recorder, condition: View | Condition, x: Any = None, y: Any = None) -> View:
    if x is None:
        raise NoLowering("where without values, whose size depends on data", "keep the mask, and multiply by it")
    condition = condition if isinstance(condition, Condition) else Condition(condition, True)
    x, y = _number(rec, x), _number(rec, y)
    if isinstance(x, View) and not isinstance(y, View):
        return masked(rec, x, condition, float(y))
    if isinstance(y, View) and not isinstance(x, View):
        return masked(rec, y, negated(rec, condition), float(x))
    true = rec.truth(condition)
    false = rec.unary("eq", true, "_not", 0.0)
    if isinstance(x, View) and isinstance(y, View):
        parts = rec.binary("keep", x, true, "_first"), rec.binary("keep", y, false, "_second")
    else:
        assert not isinstance(x, View) and not isinstance(y, View)
        parts = rec.unary("pick", true, "_first", float(x)), rec.unary("pick", false, "_second", float(y))
    return rec.binary("add", *parts)


# -- masks by rank ----------------------------------------------------------------------------------------------------


@operator("topk")
def _topk(rec: Recorder, x: View, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Any]:
    """The values, and the places as what ``scatter`` takes; both are found between regions, and not timed."""
    dim %= len(x.shape)
    tensor = rec.plain(x)
    if 1 in (*x.shape, k) or not x.shape:
        raise NoLowering(f"topk of {k} in a tensor of shape {x.shape}", "use amax, or drop dimensions of size 1")
    shape = tuple(k if d == dim else size for d, size in enumerate(x.shape))
    args = (dim, k, int(largest))
    marked = rec.spread(rec.move("topk", [tensor], x.shape, args, f"{rec.at}_marked"), x.shape)
    values = rec.spread(rec.move("topk_values", [tensor], shape, args, f"{rec.at}_values"), shape)
    places = rec.spread(rec.move("topk_places", [tensor], shape, args, f"{rec.at}_places"), shape)
    return [values, Places(places.tensor, places.dims, places.shape, marked, dim)]


@dataclass(frozen=True)
class Places(View):
    """Places of the ``k`` largest along ``dim``; ``marked``: as ones where they are."""

    marked: View
    dim: int


def scattered_places(rec: Recorder, base: float | View, places: Places, value: Any) -> View:
    """``value`` at the places, ``base`` elsewhere; of values one a place, those whose place is the coordinate."""
    marked = Condition(places.marked, True)
    if not isinstance(value, View):
        return _where(rec, marked, value, base)
    if value.shape != places.shape:
        raise NoLowering("a scatter of more values than places", "cut them")
    dim = places.dim
    size, after = places.marked.shape[dim], len(places.shape) - dim - 1
    numbers = rec.known(torch.arange(size, dtype=torch.float64).reshape(size, *[1] * after), "_numbers")
    shape = (*places.shape[: dim + 1], 1, *places.shape[dim + 1 :])
    here = rec.binary("eq", rec.reshape(places, shape), numbers, "_here")
    made = rec.reduce(rec.binary("keep", rec.reshape(value, shape), here, "_values"), [dim], False, suffix="_placed")
    return made if base == 0.0 else _where(rec, marked, made, base)


# -- known tensors ----------------------------------------------------------------------------------------------------


def _filled(fill: float | None, at: int = -1) -> Any:
    def make(shape: tuple[int, ...], args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        value = fill if fill is not None else args[at]
        return torch.full(shape, value, dtype=kwargs.get("dtype") or torch.float64)

    return make


for _name in ("zeros_like", "new_zeros", "empty_like", "new_empty"):
    FACTORIES[_name] = _filled(0.0)
for _name in ("ones_like", "new_ones"):
    FACTORIES[_name] = _filled(1.0)
FACTORIES["full_like"], FACTORIES["new_full"] = _filled(None, 1), _filled(None, 2)

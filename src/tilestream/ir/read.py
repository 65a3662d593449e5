"""Pipelines written as text, so that they read like the formulas they stand for.

    x[rows,k] = load X[rows,k]
    h[rows,hid]:f32 = product x W1[hid,k]       a bare name is a tile under its own axes
    one[edges]:f32 = fill value=1.0             of no operands
    y -> Y[rows,out]                            a store; ``+>`` adds into memory

Coordinates: ``V[senders[edges],f]`` (a gather), ``X[n,2*y+ky-1,c]`` (a tap), ``x[rows,c+128]`` (a slice). Attributes
are words with ``=``: ``scalar=0.5``, ``combine=max``. What follows ``#`` is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tilestream.errors import IRError
from tilestream.ir.axes import At, Axis, View, along
from tilestream.ir.pipeline import Role, Tensor, Tile, TileOp

_NAMED = re.compile(r"([\w.]+)(?:\[(.*)\])?(?::(\w+))?$")


def axes(text: str) -> dict[str, Axis]:
    """``rows k=32 edges=starts[rows]``: axes by name; those without a size are read at the call, and of ragged ones
    the bounds of each position of the axis around them.

    Raises:
        IRError: what stands behind a ``=`` is neither.
    """
    return {name: _axis(name, size) for name, _, size in (word.partition("=") for word in text.split())}


def _axis(name: str, size: str) -> Axis:
    ragged = re.match(r"([\w.]+)\[([\w.]+)\]$", size)
    if ragged:
        return Axis(name, of=ragged[2], bounds=ragged[1])
    if size and not size.isdigit():
        raise IRError(f"cannot read axis {name}={size}", "write NAME, NAME=SIZE or NAME=BOUNDS[AXIS]")
    return Axis(name, int(size) if size else None)


def tensors(text: str, known: Mapping[str, Axis]) -> tuple[Tensor, ...]:
    """``X[rows,k] W[hid,k] >Y[rows,hid]:f32``: ``>`` marks an output, a capital W begins a parameter's name, as
    the bounds of a ragged axis are one.

    Raises:
        IRError: an axis is not known.
    """
    made = []
    bounds = {a.bounds for a in known.values()}
    for word in text.split():
        name, dims, dtype = _named(word.lstrip(">"))
        role = Role.OUTPUT if word[0] == ">" else Role.PARAMETER if name[0] == "W" or name in bounds else Role.INPUT
        made.append(Tensor(name, role, _known((dims or "").split(","), known), dtype or "bf16"))
    return tuple(made)


def program(text: str, known: Mapping[str, Axis], **taken: str) -> tuple[TileOp, ...]:
    """Ops, a line each. ``taken`` gives the axes of tiles that come from queues: ``h="rows,hid"``.

    Raises:
        IRError: a line cannot be read, or names an axis that is not known.
    """
    tiles = {name: tuple(dims.split(",")) for name, dims in taken.items()}
    ops: list[TileOp] = []
    for line in filter(None, (raw.split("#")[0].strip() for raw in text.splitlines())):
        arrow = re.match(r"(.+?) ([+-])> (.+)$", line)
        if arrow:
            tile, sign, to = arrow.groups()
            kind = "store_add" if sign == "+" else "store"
            ops.append(TileOp(kind, None, (_view(tile, tiles),), (_view(to, tiles),), source=line))
            continue
        left, equals, right = line.partition(" = ")
        if not equals:
            raise IRError(f"cannot read {line!r}", "write TILE[axes] = KIND operands, or TILE -> TENSOR[axes]")
        kind, *words = right.split()
        values = dict(w.split("=") for w in words if "=" in w)
        views = [_view(w, tiles) for w in words if "=" not in w]
        name, dims, dtype = _named(left.strip())
        own = tuple(d for d in (dims or "").split(",") if d)
        combine = values.pop("combine", "max" if kind == "max" else "sum")
        ops.append(
            TileOp(
                kind,
                Tile(name, _known(own, known), dtype or "bf16"),
                tuple(v for v in views if v.of in tiles),
                tuple(v for v in views if v.of not in tiles),
                tuple((key, float(value)) for key, value in values.items()),
                line,
                combine,
            )
        )
        tiles[name] = own
    return tuple(ops)


def _named(text: str) -> tuple[str, str | None, str | None]:
    found = _NAMED.match(text)
    if found is None:
        raise IRError(f"cannot read {text!r}", "write NAME[axes]:dtype")
    name, dims, dtype = found.groups()
    return name, dims, dtype


def _known(names, known: Mapping[str, Axis]) -> tuple[Axis, ...]:
    for name in names:
        if name and name not in known:
            raise IRError(f"no axis {name!r}", f"use one of: {', '.join(known)}")
    return tuple(known[name] for name in names if name)


def _view(text: str, tiles: Mapping[str, tuple[str, ...]]) -> View:
    name, dims, _ = _named(text.strip())
    if dims is None:
        if name not in tiles:
            raise IRError(f"no tile {name!r} is made before it is used", "define it, or name the tensor's axes")
        return along(name, tiles[name])
    return View(name, tuple(_at(d) for d in re.split(r",(?![^\[]*\])", dims) if d))


def _at(text: str) -> At:
    text, index = text.strip(), ""
    through = re.match(r"([\w.]+)\[(.*)\]$", text)
    if through:
        index, text = through.groups()
    terms = re.findall(r"([+-]?)(?:(\d+)\*)?(\w+)", text)
    offset = sum(int(sign + word) for sign, _, word in terms if word.isdigit())
    found = [(word, int(stride or 1)) for _, stride, word in terms if not word.isdigit()]
    strides = tuple(s for _, s in found) if any(s != 1 for _, s in found) else ()
    return At(tuple(a for a, _ in found), offset, index, strides)

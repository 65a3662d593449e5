"""What is known of gathered rows when edges' values are multiplied in: enough to see a product with the adjacency."""

from __future__ import annotations

from dataclasses import replace

from tilestream.sparse.recorder import Gathered, Recorder, View


def carried(rec: Recorder, op: str, x: View, y: View, made: View) -> View:
    """``made`` is ``x op y``: gathered rows times (or over) something are gathered rows with a factor."""
    if op not in ("mul", "div"):
        return made
    if isinstance(x, Gathered) and len(y.shape) <= len(x.shape):
        return _times(rec, x, y if op == "mul" else rec.unary("reciprocal", y, "_inverse"), made)
    if op == "mul" and isinstance(y, Gathered) and len(x.shape) <= len(y.shape):
        return _times(rec, y, x, made)
    return made


def scaled(rec: Recorder, op: str, x: View, scalar: float, made: View) -> View:
    """``made`` is ``x op scalar``."""
    if not isinstance(x, Gathered) or op not in ("mul", "div"):
        return made
    source = rec.unary(op, x.source, "_source", scalar)
    return replace(_as(x, made), source=source)


def _times(rec: Recorder, rows: Gathered, other: View, made: View) -> Gathered:
    factor = other if rows.factor is None else rec.binary("mul", rows.factor, other, "_factor")
    return replace(_as(rows, made), factor=factor)


def _as(rows: Gathered, made: View) -> Gathered:
    return replace(rows, tensor=made.tensor, dims=made.dims, shape=made.shape)

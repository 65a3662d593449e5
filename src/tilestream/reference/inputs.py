"""Checks of the tensors given to a pipeline, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.errors import InputError
from tilestream.ir.dtypes import ELEMENT_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, Tensor, TileOp
from tilestream.ir.taps import rows_given
from tilestream.reference.ops import Arithmetic


def check_inputs(pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], arithmetic: Arithmetic) -> int:
    """The number of rows, which all inputs share.

    Raises:
        InputError: a tensor is missing, is not of the pipeline, or has the wrong shape, dtype or device; or an index
            names a row that there is not.
    """
    wanted = {t.name: t for t in pipeline.tensors if t.role is not Role.OUTPUT}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise InputError(
            f"pipeline {pipeline.name!r} was not given {', '.join(map(repr, missing))}",
            f"pass every input and parameter: {', '.join(wanted)}",
        )
    extra = [name for name in tensors if name not in wanted]
    if extra:
        raise InputError(
            f"pipeline {pipeline.name!r} does not take {', '.join(map(repr, extra))}",
            f"pass its inputs and parameters only: {', '.join(wanted)}",
        )
    for name, want in wanted.items():
        _check_tensor(want, tensors[name], arithmetic)
    for op in (op for stage in pipeline.stages for op in stage.ops if op.index):
        _check_index(op, tensors[op.params[0]], tensors[op.index])
    return rows_given(pipeline, lambda name: tensors[name].shape[0])


def _check_tensor(want: Tensor, got: torch.Tensor, arithmetic: Arithmetic) -> None:
    what = f"{want.role.value} {want.name!r}"
    if not isinstance(got, torch.Tensor):
        raise InputError(f"{what} is a {type(got).__name__}", "give a torch.Tensor")
    shape = tuple(got.shape)
    sizes = tuple(a.size for a in want.axes)
    if len(shape) != len(sizes) or any(n not in (None, m) for n, m in zip(sizes, shape, strict=True)):
        words = ["rows" if n is None else str(n) for n in sizes]
        expected = f"[{', '.join(words)}]"
        raise InputError(f"{what} has shape {list(shape)}, the pipeline takes {expected}", "reshape it")
    dtype = ELEMENT_DTYPES[want.dtype]
    if got.dtype != dtype and not (got.dtype == arithmetic.dtype and not arithmetic.rounds):
        raise InputError(f"{what} is {got.dtype}, the pipeline takes {dtype}", f"convert it with .to({dtype})")
    if got.device.type != "cpu":
        raise InputError(f"{what} is on {got.device}, the reference machine runs on the CPU", "move it with .cpu()")


def _check_index(op: TileOp, table: torch.Tensor, index: torch.Tensor) -> None:
    """An index names rows of its table; those below zero count from its end, as in torch."""
    rows = len(table)
    outside = (index < -rows) | (index >= rows)
    if bool(outside.any()):
        at = int(outside.nonzero()[0, 0])
        raise InputError(
            f"index {op.index!r} is {int(index[at])} where table {op.params[0]!r} has {rows} rows"
            f" ({op.source or 'no source line'})",
            f"give indices from {-rows} to {rows - 1}",
        )

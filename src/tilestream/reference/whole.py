"""A pipeline as plain torch operators on whole tensors: what runs where neither kernels nor tiles can."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.ir.axes import ROWS
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.taps import rows_given
from tilestream.ir.ways import producers_first
from tilestream.reference.ops import arithmetic_of
from tilestream.reference.rows import Rows
from tilestream.reference.whole_ragged import run_ragged


def run_whole(pipeline: Pipeline, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every output of ``pipeline`` on the device of its tensors: ``[rows, features]``, and sums over all rows.

    The same rounding as ``reference.run``, without stages, tiles or queues: ops in the order of their operands. Of
    general axes those of weight gradients and backward chains (``plan.gradients``, ``plan.backward_chains``), and
    pipelines of one ragged axis (``whole_ragged``).

    Args:
        tensors: every input, ``[rows, features]``, and every parameter, of its declared shape and dtype; or all of them
            in float64, and nothing is rounded.
    """
    if len(pipeline.ragged) == 1:
        return run_ragged(pipeline, tensors)
    arithmetic = arithmetic_of(tensors.values())
    rows = rows_given(pipeline, lambda name: tensors[name].shape[0])
    memory, tiles, every = Rows(pipeline, tensors, rows, arithmetic), pipeline.tiles(), slice(None)
    values: dict[str, torch.Tensor] = {}
    for op in (op for stage in producers_first(pipeline) for op in stage.ops):
        if op.out is None:
            memory.store(op, values[op.ins[0]], every)
        elif op.kind == "load":
            values[op.out.name] = memory.load(op, every)
        elif op.kind == "product":
            first, *others = (arithmetic.stored(values[name], tiles[op.ins[0]].dtype) for name in op.ins)
            made = first @ tensors[op.params[0]] if ROWS in op.out.axes else first.t() @ others[0]
            values[op.out.name] = arithmetic.widen(made)
        elif op.kind == "sum" and ROWS not in op.out.axes:
            values[op.out.name] = values[op.ins[0]].sum(0, dtype=arithmetic.dtype)
        else:
            values[op.out.name] = memory.evaluate(op, values)
    return memory.results()

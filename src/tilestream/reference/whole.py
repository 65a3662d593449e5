"""A pipeline as plain torch operators on whole tensors: what runs where neither kernels nor tiles can."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.ir.axes import ROWS
from tilestream.ir.columns import first_column, is_part
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, TileOp
from tilestream.ir.taps import Tap
from tilestream.reference.node_sums import NodeSums
from tilestream.reference.ops import FLOAT64, WORKING, evaluate, pixels
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
    exact = all(t.dtype == torch.float64 for t in tensors.values() if t.is_floating_point())
    arithmetic = FLOAT64 if exact else WORKING
    tiles = pipeline.tiles()
    values: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    left: list[TileOp] = [op for stage in pipeline.stages for op in stage.ops]
    while left:
        ready = [op for op in left if all(name in values for name in op.ins)]
        for op in ready:
            if op.receivers:
                made = NodeSums(op.combine, tensors[op.params[2]].long(), tiles[op.ins[0]].features, arithmetic.dtype)
                made.add(tensors[op.receivers], values[op.ins[0]])
                outputs[op.params[0]] = arithmetic.stored(made.result(), pipeline.tensor(op.params[0]).dtype)
            elif op.out is None:
                _store(op, arithmetic.stored(values[op.ins[0]], pipeline.tensor(op.params[0]).dtype), pipeline, outputs)
            elif op.kind == "load":
                values[op.out.name] = _load(op, tensors)
            elif op.kind == "product":
                dtype = torch.float64 if exact else TORCH_DTYPES[tiles[op.ins[0]].dtype]
                first = values[op.ins[0]].to(dtype)
                if ROWS in op.out.axes:
                    values[op.out.name] = first @ tensors[op.params[0]]
                else:
                    values[op.out.name] = first.t() @ values[op.ins[1]].to(dtype)
            elif op.kind == "sum" and ROWS not in op.out.axes:
                values[op.out.name] = values[op.ins[0]].sum(0, dtype=arithmetic.dtype)
            else:
                ins = [arithmetic.widen(values[name]) for name in op.ins]
                params = [arithmetic.widen(tensors[name]) for name in op.params]
                values[op.out.name] = evaluate(op, ins, [tiles[name] for name in op.ins], params, arithmetic)
        left = [op for op in left if op not in ready]
    return {t.name: outputs[t.name] for t in pipeline.by_role(Role.OUTPUT)}


def _load(op: TileOp, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    value, tap = tensors[op.params[0]], Tap.of(op)
    if tap is not None:
        return pixels(value, tap, torch.arange(len(value) * tap.pixels, device=value.device))
    return value[tensors[op.index].long()] if op.index else value


def _store(op: TileOp, value: torch.Tensor, pipeline: Pipeline, outputs: dict[str, torch.Tensor]) -> None:
    """All columns of an output, or a part of them."""
    name = op.params[0]
    if not is_part(op):
        outputs[name] = value
        return
    whole = outputs.setdefault(name, value.new_empty(value.shape[0], pipeline.tensor(name).features))
    whole[:, first_column(op) : first_column(op) + value.shape[1]] = value

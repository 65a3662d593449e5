"""A pipeline as plain torch operators on whole tensors: what runs where neither kernels nor tiles can."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.ir.axes import ROWS
from tilestream.ir.columns import first_column, is_part
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, TileOp
from tilestream.ir.plain import by_rows
from tilestream.ir.taps import Tap
from tilestream.reference.ops import FLOAT64, WORKING, evaluate, pixels


def run_whole(pipeline: Pipeline, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every output of ``pipeline``, ``[rows, features]``, on the device of its tensors.

    The same rounding as ``reference.run``, without stages, tiles or queues: ops in the order of their operands.

    Args:
        tensors: every input, ``[rows, features]``, and every parameter, of its declared shape and dtype.
    """
    if not by_rows(pipeline):
        return _sums(pipeline, tensors)
    tiles = pipeline.tiles()
    values: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    left: list[TileOp] = [op for stage in pipeline.stages for op in stage.ops]
    while left:
        ready = [op for op in left if all(name in values for name in op.ins)]
        for op in ready:
            if op.kind == "load":
                value, tap = WORKING.widen(tensors[op.params[0]]), Tap.of(op)
                value = value[tensors[op.index].long()] if op.index else value
                if tap is not None:
                    value = pixels(value, tap, torch.arange(len(value) * tap.pixels, device=value.device))
            elif op.out is None:
                _store(op, WORKING.stored(values[op.ins[0]], pipeline.tensor(op.params[0]).dtype), pipeline, outputs)
                continue
            else:
                params = [WORKING.widen(tensors[name]) for name in op.params]
                value = evaluate(op, [values[n] for n in op.ins], [tiles[n] for n in op.ins], params, WORKING)
            assert op.out is not None
            values[op.out.name] = value
        left = [op for op in left if op not in ready]
    return {t.name: outputs[t.name] for t in pipeline.by_role(Role.OUTPUT)}


def _store(op: TileOp, value: torch.Tensor, pipeline: Pipeline, outputs: dict[str, torch.Tensor]) -> None:
    """All columns of an output, or a part of them."""
    name = op.params[0]
    if not is_part(op):
        outputs[name] = value
        return
    whole = outputs.setdefault(name, value.new_empty(value.shape[0], pipeline.tensor(name).features))
    whole[:, first_column(op) : first_column(op) + value.shape[1]] = value


def _sums(pipeline: Pipeline, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stationary sums (``plan.gradients``) and backward chains (``plan.backward_chains``): products and sums over all
    rows, accumulated in fp32, and what is made row by row beside them. Operands in float64 are not rounded."""
    tiles = pipeline.tiles()
    exact = all(t.dtype == torch.float64 for t in tensors.values())
    arithmetic = FLOAT64 if exact else WORKING
    values: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    for op in (op for stage in pipeline.stages for op in stage.ops):
        if op.out is None:
            dtype = pipeline.tensor(op.params[0]).dtype
            outputs[op.params[0]] = arithmetic.stored(values[op.ins[0]], dtype)
        elif op.kind == "load":
            values[op.out.name] = tensors[op.params[0]]
        elif op.kind == "product":
            dtype = torch.float64 if exact else TORCH_DTYPES[tiles[op.ins[0]].dtype]
            left = values[op.ins[0]].to(dtype)
            over_rows = ROWS not in op.out.axes
            right = values[op.ins[1]].to(dtype) if over_rows else tensors[op.params[0]]
            values[op.out.name] = left.t() @ right if over_rows else left @ right
        elif op.kind == "sum":
            values[op.out.name] = values[op.ins[0]].sum(0, dtype=arithmetic.dtype)
        else:
            wide = [arithmetic.widen(values[name]) for name in op.ins]
            values[op.out.name] = evaluate(op, wide, [tiles[name] for name in op.ins], [], arithmetic)
    return outputs

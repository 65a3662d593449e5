"""Recognise RMSNorm where torch has traced it in pieces (as ``torch.nn.RMSNorm`` does under Dynamo)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tilestream.ir.pipeline import Tensor, TileOp

_CHAIN = ("square", "mean", "add", "rsqrt", "mul")
"""The pieces, first to last; the last multiplies by ``x`` again."""


def fuse_rms_norm(ops: tuple[TileOp, ...], tensors: Mapping[str, Tensor]) -> tuple[TileOp, ...]:
    """``x * rsqrt(mean(x * x) + eps)``, times a vector if one follows, becomes one ``rms_norm``.

    Both forms compute in fp32; the fused one spares five names and lets a kernel keep the row.
    """
    uses = Counter(n for op in ops for n in op.ins)
    makers = {op.out.name: op for op in ops if op.out is not None}
    users = {n: op for op in ops for n in op.ins}
    gone: set[str] = set()
    fused: dict[str, TileOp] = {}
    for op in ops:
        found = _match(op, makers, uses)
        if found is None or op.out is None:
            continue
        x, eps, inner = found
        last, params = op, ()
        after = users.get(op.out.name)
        if after is not None and after.kind == "mul" and uses[op.out.name] == 1:
            if [tensors[name].shape for name in after.params] == [(op.out.features,)]:  # no scalar, nor a wider vector
                last, params = after, after.params
                inner = [*inner, op.out.name]
        gone.update(inner)
        fused[last.made.name] = replace(last, kind="rms_norm", tiles=(x,), tensors=params, attrs=(("eps", eps),))
    return tuple(
        fused.get(op.out.name, op) if op.out is not None else op
        for op in ops
        if op.out is None or op.out.name not in gone
    )


def _match(op: TileOp, makers: dict[str, TileOp], uses: Counter[str]) -> tuple[str, float, list[str]] | None:
    if op.kind != "mul" or len(op.ins) != 2:
        return None
    for x, scale in (op.ins, op.ins[::-1]):
        names, at = [], scale
        for kind in reversed(_CHAIN[:-1]):
            maker = makers.get(at)
            if maker is None or maker.kind != kind or uses[at] != 1 or maker.params or len(maker.ins) != 1:
                break
            names.append(at)
            at = maker.ins[0]
        else:
            eps = makers[names[1]].attr("scalar")
            if at == x and isinstance(eps, float):
                return x, eps, names
    return None

"""What a training graph saves is what it goes on with: gradients are as exact as eager's."""

from __future__ import annotations

import copy

import torch
from on_reference import compiled
from torch import Tensor, nn

from tilestream.graph.region import round_results
from tilestream.ir.pipeline import Tile, TileOp


class Normalised(nn.Module):
    """Two layers, and between them a norm in fp32 of a 16-bit value, whose mean is far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 24)
        with torch.no_grad():
            self.first.bias.add_(8.0)
            self.last.weight.add_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        wide = h.float()
        centred = wide - wide.mean(-1, keepdim=True)
        return self.last((centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).to(h.dtype))


def test_gradients_are_as_exact_as_eagers(fresh: None) -> None:
    module, x, target = Normalised().bfloat16(), torch.randn(300, 12).bfloat16(), torch.randn(300, 24)
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    for function, given in ((compiled(module), x), (eager, x), (exact, x.double())):
        (function(given) - target).square().mean().backward()
    for got, own, want in zip(module.parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None and own.grad is not None and want.grad is not None
        error, allowed = ((g.grad.double() - want.grad).norm() for g in (got, own))  # pyright: ignore
        assert error <= 2 * allowed


def test_who_reads_it_rounded() -> None:
    def op(kind: str, out: str, *ins: str, dtype: str = "bf16", tensors: tuple[str, ...] = ()) -> TileOp:
        return TileOp(kind, Tile.of(out, 8, dtype), ins, tensors)

    def store(tile: str) -> TileOp:
        return TileOp("store", None, (tile,), (f"y.{tile}",))

    linear = op("linear", "a", "x", tensors=("w",))
    ops = (
        op("load", "x", tensors=("X",)),
        linear,
        op("mean", "m", "a", dtype="f32"),
        op("linear", "b", "a", tensors=("w",)),
    )
    rounded = round_results((*ops, store("a"), store("m")))
    cast = next(o for o in rounded if o.kind == "cast")
    assert cast.ins == ("a",) and cast.out is not None and cast.out.dtype == "bf16"
    assert all(o.ins == (cast.out.name,) for o in rounded[3:6]) and rounded[-1] == store("m")  # fp32 leaves as it is
    assert round_results((*ops, store("m"))) == (*ops, store("m"))  # nothing leaves
    kept = (ops[0], linear, ops[3], store("a"))
    assert round_results(kept) == kept  # a linear's operand is rounded anyway

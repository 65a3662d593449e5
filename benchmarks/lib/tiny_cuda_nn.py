"""tiny-cuda-nn's training step: its times on an H200, and its arithmetic, emulated.

Its fused kernel keeps sums in fp16 and rounds them after every 16 columns (``wmma`` of 16 x 16 x 16 with fp16
accumulators), forward and for dX. Its weights' gradients are CUTLASS's products with fp16 accumulators, 8 rows at a
time, over slices of 4,096 rows, which are added in fp16. Emulated is that rounding alone, one sum after another; where
inside a tensor core it rounds is not documented.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MICROSECONDS = {
    (64, 2**14): (23, 33, 52),
    (64, 2**18): (151, 220, 485),
    (128, 2**14): (56, 95, 148),
    (128, 2**18): (399, 705, 1377),
}
"""By width and rows, with 2, 4 and 8 hidden layers: forward, dX and dW, no biases.

Commit 6ee3546, the better of its fused kernel and its newer one; timed once, on the same kind of machine as ours.
"""


def summed(left: Tensor, right: Tensor, depth: int) -> Tensor:
    """``left @ right`` [.., m, n] with a sum in fp16, rounded after every ``depth`` of what is summed."""
    parts = zip(left.float().split(depth, -1), right.float().split(depth, -2), strict=True)
    total = torch.zeros((), device=left.device)
    for a, b in parts:
        total = (total + a @ b).half().float()
    return total.half()


def emulated(module: nn.Sequential, x: Tensor, gradient: Tensor, slice_rows: int = 4096) -> list[Tensor]:
    """The gradients in tiny-cuda-nn's arithmetic."""
    weights = [p.detach() for p in module.parameters()]
    kept = [x.detach()]
    for w in weights[:-1]:
        kept.append(summed(kept[-1], w.t(), 16).relu())
    made: list[Tensor] = []
    for w, x_in in zip(reversed(weights), reversed(kept), strict=True):
        sliced = [t.unflatten(0, (-1, min(slice_rows, len(t)))) for t in (gradient, x_in)]
        parts = summed(sliced[0].transpose(1, 2), sliced[1], 8)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        made.append(total)
        gradient = summed(gradient, w, 16)
        if x_in is not kept[0]:
            gradient = gradient * (x_in > 0)
    return [gradient, *reversed(made)]

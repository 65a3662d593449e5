"""The oracle: a result is right if its error against float64 is at most twice eager's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

FACTOR = 2.0
"""How many times eager's error is allowed, as in ``torch._dynamo.utils.same`` with an fp64 reference."""


def error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """Relative L2 error of ``out`` against the float64 result, without units.

    NaN and infinite elements must agree in place and sign; where they do not, the error is
    ``inf``. Finite elements are compared by ``|out - ref| / |ref|`` in the Frobenius norm. Elements that are
    finite in float64 but beyond the range of ``out.dtype`` count as infinities of their sign.
    """
    if out.shape != ref64.shape or out.is_complex() != ref64.is_complex():
        return float("inf")
    if out.is_complex():  # both parts count
        out, ref64 = (torch.view_as_real(t.detach().resolve_conj()) for t in (out, ref64))
    if out.numel() == 0:
        return 0.0
    got = out.detach().double()
    want = ref64.detach().to(device=got.device, dtype=torch.float64)
    rounded = want.to(out.dtype) if out.dtype.is_floating_point else want
    if bool(torch.isfinite(got).all() & torch.isfinite(rounded).all()):  # nothing to leave out, which costs copies
        return _relative(got - want, want)
    if out.dtype.is_floating_point:
        special = torch.isfinite(want) & ~torch.isfinite(want.to(out.dtype))
        want = torch.where(special, want.sign() * float("inf"), want)
    finite = torch.isfinite(want)
    if not torch.equal(torch.isnan(got), torch.isnan(want)):
        return float("inf")
    infinite = torch.isinf(want)
    if not torch.equal(torch.isinf(got), infinite) or not torch.equal(got[infinite], want[infinite]):
        return float("inf")
    return _relative((got - want)[finite], want[finite])


def _relative(difference: torch.Tensor, want: torch.Tensor) -> float:
    """Norm over norm; the first alone where the second is 0."""
    norms = torch.stack([torch.linalg.vector_norm(difference), torch.linalg.vector_norm(want)])
    off, size = norms.tolist()
    return off / size if size > 0 else off


_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64} | {
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Products of groups, as those of a mixture's experts, in float64, which torch has no kernel for.

    ``offs``, int32 of [groups], says where each group ends: among the rows of ``left``, the columns of ``right``, or,
    where both are matrices, among what is summed.
    """
    if offs is None:
        return torch.bmm(left, right)
    ends = offs.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, first:last] @ right[first:last] for first, last in groups])
    if left.dim() == 2:
        made = left.new_zeros(left.shape[0], right.shape[-1])
        for (first, last), matrix in zip(groups, right, strict=True):
            made[first:last] = left[first:last] @ matrix
        return made
    made = left.new_zeros(left.shape[1], right.shape[1])
    for (first, last), matrix in zip(groups, left, strict=True):
        made[:, first:last] = matrix @ right[:, first:last]
    return made


_MEANINGS: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Of operators that torch has no float64 kernel for."""


class Float64(TorchDispatchMode):
    """Inside, every operator computes in float64: a cast to a lower precision rounds nothing.

    Tensors of lower precision count as what they are, exactly. What is written in place keeps its dtype.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _SOFTMAX:
            args = (*args[:2], False)  # no other dtype than its operand's
        aliases = any(a.alias_info is not None for a in (*func._schema.arguments, *func._schema.returns))
        args, kwargs = tree_map(_dtype if aliases else _widest, (args, kwargs or {}))
        return (_MEANINGS.get(func) or func)(*args, **kwargs)


def in_float64(run: Callable[..., Sequence[torch.Tensor]], values: Sequence[Any]) -> list[torch.Tensor]:
    """What ``run`` returns of ``values``, computed in float64 from start to end."""
    with Float64():
        return list(run(*tree_map(_widest, list(values))))


def _dtype(x: Any) -> Any:
    return _WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def _widest(x: Any) -> Any:
    return x.to(_WIDE[x.dtype]) if isinstance(x, torch.Tensor) and x.dtype in _WIDE else _dtype(x)


def tolerance(eager_error: float, dtype: torch.dtype) -> float:
    """The largest error allowed: twice eager's, and never less than the rounding of one store of ``dtype``.

    The floor matters only where eager happens to be exact (one operation, few elements).
    """
    floor = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
    return max(FACTOR * eager_error, floor)


def judge(
    outs: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], ref64: Sequence[torch.Tensor]
) -> tuple[float, float, bool]:
    """Worst error of ``outs``, worst error of ``eager``, and whether every output is within tolerance."""
    if len(eager) != len(ref64):
        return 0.0, 0.0, False
    return judge_by(outs, [error(plain, exact) for plain, exact in zip(eager, ref64, strict=True)], ref64)


def judge_by(
    outs: Sequence[torch.Tensor], eager: Sequence[float], ref64: Sequence[torch.Tensor]
) -> tuple[float, float, bool]:
    """``judge`` where eager's errors are known."""
    worst = own = 0.0
    good = len(outs) == len(eager) == len(ref64)
    for out, theirs, exact in zip(outs, eager, ref64, strict=False):
        mine = error(out, exact)
        worst, own = max(worst, mine), max(own, theirs)
        good = good and (mine <= tolerance(theirs, out.dtype))
    return worst, own, good

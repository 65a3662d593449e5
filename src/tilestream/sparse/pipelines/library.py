"""Statements and moves as PyTorch's operators on dense tensors, and neighbouring ones as one compiled function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from tilestream.errors import SparseError
from tilestream.sparse.cpu.moves import dense
from tilestream.sparse.einsum import Move, Statement

STORED = " stored"
"""Behind the name of a sparse matrix: where it stores something, as a dense tensor of booleans."""

UNARY: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, name)
    for name in "relu exp log rsqrt sqrt neg abs sigmoid tanh sin cos square reciprocal floor ceil trunc round erf tan "
    "asin acos atan".split()
} | {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "identity": lambda x: x,
    "copy": lambda x: x,
    "zeroed": lambda x: torch.where(x == -math.inf, 0.0, x),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "keep": lambda a, b: torch.where(b != 0, a, 0.0),
    "shift": lambda a, b: torch.where(a == -math.inf, a, a - b),
    "share": lambda a, b: torch.where((a == 0) & (b == 0), 0.0, a / b),
    "pow": torch.pow,
    "mod": torch.remainder,
    "atan2": torch.atan2,
}
SCALAR: dict[str, Callable[[Any, float], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "rsub": lambda a, s: s - a,
    "mul": torch.mul,
    "div": torch.div,
    "rdiv": lambda a, s: s / a,
    "max": lambda a, s: torch.clamp(a, min=s),
    "min": lambda a, s: torch.clamp(a, max=s),
    "pick": lambda a, s: torch.where(a != 0, s, 0.0),
    "cast": lambda a, s: a if s >= 24 else a.to(torch.bfloat16 if s == 8 else torch.float16).to(a.dtype),
}
COMPARED = ("gt", "ge", "lt", "le", "eq", "ne")


def evaluated(s: Statement, have: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """What a statement gives, by names of dense tensors; a stored matrix has zeros, or its fill, elsewhere.

    Args:
        dtype: products are made of operands of this type; all else is in float32.

    Raises:
        SparseError: PyTorch has no such operator here.
    """
    if s.op == "mul" and s.reduced and s.reduction == "add" and len(s.operands) == 2 and s.scalar is None:
        return _product(s, [have[a.tensor].to(dtype) for a in s.operands]).float()
    letters = (*s.indices, *s.reduced)
    if s.op == "mask":
        value, mask = s.operands
        stored = _aligned(have[mask.tensor + STORED], mask.indices, letters)
        made = torch.where(stored, _aligned(have[value.tensor].float(), value.indices, letters), s.fill)
    else:
        operands = [_aligned(have[a.tensor].float(), a.indices, letters) for a in s.operands]
        made = _combined(s, operands)
    if not s.reduced:
        return made
    over = list(range(len(s.indices), len(letters)))
    return torch.amax(made, over) if s.reduction == "max" else torch.sum(made, over)


def _combined(s: Statement, operands: Sequence[Any]) -> Any:
    if s.op in COMPARED:
        first, other = operands[0], operands[1] if len(operands) == 2 else s.scalar
        return getattr(torch, s.op)(first, other).to(torch.float32)
    if len(operands) == 2:
        table, given = BINARY, tuple(operands)
    elif s.scalar is not None:
        table, given = SCALAR, (operands[0], s.scalar)
    else:
        table, given = UNARY, (operands[0],)
    if s.op not in table:
        raise SparseError(f"{s}: {s.op!r} is nothing that PyTorch does here", "use --target cpu or streams")
    return table[s.op](*given)


def _aligned(x: Any, own: Sequence[str], letters: Sequence[str]) -> Any:
    """Under other indices: its dimensions in their order, of size 1 where it has none."""
    order = sorted(range(len(own)), key=lambda d: letters.index(own[d]))
    if order != list(range(len(own))):
        x = x.permute(order)
    for at, index in enumerate(letters):
        if index not in own:
            x = x.unsqueeze(at)
    return x


def _product(s: Statement, operands: Sequence[Any]) -> Any:
    """A matrix product as one where both operands are matrices; else as torch's einsum."""
    (a, x), (b, y) = zip((o.indices for o in s.operands), operands, strict=True)
    if len(a) == len(b) == len(s.indices) == 2 and set(a) & set(b) == set(s.reduced) and s.indices[0] in a:
        x = x if a[1] == s.reduced[0] else x.t()
        y = y if b[0] == s.reduced[0] else y.t()
        return torch.mm(x, y)
    letters = {i: chr(ord("a") + n) for n, i in enumerate(dict.fromkeys((*a, *b)))}
    text = ["".join(letters[i] for i in part) for part in (a, b, s.indices)]
    return torch.einsum(f"{text[0]},{text[1]}->{text[2]}", x, y)


def function(
    steps: Sequence[Statement | Move],
    reads: Sequence[str],
    makes: Sequence[str],
    dtype: torch.dtype,
    compiled: bool,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Steps as one function of the tensors ``reads``, which gives ``makes``, all of ``dtype``.

    Steps that are alike but for their names, as those of equal layers, are the same function.

    Raises:
        SparseError: PyTorch has no operator for a step.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    have: dict[str, Any] = {n: fx.Proxy(graph.placeholder(f"x{k}"), tracer) for k, n in enumerate(reads)}
    for step in steps:
        if isinstance(step, Move):
            have[step.name] = dense(step, [have[n] for n in step.operands])
            if have[step.name] is None:
                raise SparseError(f"{step}: PyTorch has no such data movement here", "use --target cpu or streams")
        else:
            have[step.name] = evaluated(step, have, dtype)
    graph.output(tuple(have[n].to(dtype).node for n in makes))
    made = fx.GraphModule({}, graph)
    alone = all(isinstance(s, Move) or (s.op == "mul" and s.reduced) for s in steps)
    if not compiled or alone:  # nothing to fuse
        return made
    return _compiled.setdefault(made.code, torch.compile(made, dynamic=False))


_compiled: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {}
"""By the code of what is compiled: Inductor takes seconds, and a model has many equal layers."""

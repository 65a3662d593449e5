"""The operators that have a lowering, by name, and which of them are treated how.

A lowering takes the recorder and the operator's arguments: tensors as ``View`` (truth values as ``Condition``),
everything else as Python numbers, lists and tensors of indices; it gives a ``View``, a ``Condition`` or a list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilestream.errors import SparseError


class NoLowering(SparseError):
    """A use of an operator that its lowering does not know: PyTorch takes it apart, or runs it between regions."""


Lowering = Callable[..., Any]
OPERATORS: dict[str, Lowering] = {}
"""By the operator's name without library and overload (``add``); one that writes in place has the same lowering."""

FACTORIES: dict[str, Callable[[tuple[int, ...], Sequence[Any], dict[str, Any]], torch.Tensor]] = {}
"""Operators that make a known tensor: of the result's shape and their arguments."""

SHAPED = frozenset(
    "view reshape _unsafe_view flatten unsqueeze squeeze view_as reshape_as unflatten expand expand_as broadcast_to "
    "split split_with_sizes chunk tensor_split".split()
)
"""Operators whose lowering is told the shape of the result."""

ALIASES = SHAPED | frozenset(
    "transpose swapaxes t numpy_T mT adjoint permute slice narrow select unbind detach alias diagonal to "
    "_to_copy contiguous dropout".split()
)
"""Operators whose result may share its memory with their argument."""

TRUTHS = frozenset("where masked_fill logical_not bitwise_not scaled_dot_product_attention to _to_copy eq ne".split())
TRUTHS |= frozenset("logical_and bitwise_and logical_or bitwise_or any all clone".split())
TRUTHS |= frozenset("logical_xor bitwise_xor __and__ __or__ __xor__".split())
TRUTHS |= ALIASES - {"dropout"} | {"type_as"}
"""Operators that take truth values as they are."""

WRITING = frozenset("index_add scatter_add scatter_reduce scatter index_put index_copy index_reduce".split())
"""Operators that write into a known tensor by index; it is taken as it is."""

TYPED = frozenset(("rms_norm",))
"""Operators whose lowering is told the dtype of what they read."""

INDEXED = WRITING | frozenset(
    "index_select index gather embedding embedding_bag segment_reduce repeat_interleave index_fill".split()
)
"""Operators that take known whole numbers as indices."""


def operator(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering."""

    def register(function: Lowering) -> Lowering:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register

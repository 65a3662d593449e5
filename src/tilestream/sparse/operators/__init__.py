"""What each ATen operator is as an einsum program. A new operator is one function in one of these modules."""

from tilestream.sparse.operators import (
    activations,
    arithmetic,
    contractions,
    diagonals,
    functions,
    masks,
    messages,
    normal,
    repeated,
    shapes,
)
from tilestream.sparse.operators.registry import (
    ALIASES,
    FACTORIES,
    INDEXED,
    OPERATORS,
    SHAPED,
    TRUTHS,
    TYPED,
    WRITING,
    NoLowering,
)

_MODULES = (activations, arithmetic, contractions, diagonals, functions, masks, messages, normal, repeated, shapes)
"""Each registers its operators."""

__all__ = [
    "ALIASES",
    "FACTORIES",
    "INDEXED",
    "OPERATORS",
    "SHAPED",
    "TRUTHS",
    "TYPED",
    "WRITING",
    "NoLowering",
]

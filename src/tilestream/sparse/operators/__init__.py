"""What each ATen operator is as an einsum program. A new operator is one function in one of these modules."""

from tilestream.sparse.operators import activations, arithmetic, contractions, masks, messages, normal, shapes
from tilestream.sparse.operators.registry import ALIASES, FACTORIES, INDEXED, OPERATORS, SHAPED, TRUTHS, WRITING

_MODULES = (activations, arithmetic, contractions, masks, messages, normal, shapes)  # each registers its operators

__all__ = ["ALIASES", "FACTORIES", "INDEXED", "OPERATORS", "SHAPED", "TRUTHS", "WRITING"]

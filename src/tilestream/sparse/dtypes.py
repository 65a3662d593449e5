"""PyTorch's dtypes in programs whose numbers are float64: what an operator gives is what its dtype can hold.

Truth values stay truth values (``bool + bool`` is an or), whole numbers are exact, and floats narrower than the
module's are rounded after every operator. What float64 cannot stand for is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.recorder import Condition, Recorder, View

BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Significant bits, the implied one among them."""
_SMALL = (torch.int8, torch.uint8, torch.int16)
_MOVED = frozenset("cat stack index_select index gather flip topk sort clone relu neg abs amax amin".split())
"""Operators whose results hold what their operands hold: nothing to round."""


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The float among ``dtypes`` with most bits; float64 if there is none."""
    found = [d for d in dtypes if d.is_floating_point]
    return max(found, key=lambda d: BITS.get(d, 53), default=torch.float64)


def settled(rec: Recorder, made: Any, name: str, given: Any, result: Any, widest: torch.dtype, shaped: bool) -> Any:
    """What a lowering made, as its dtype has it.

    Args:
        name: the operator's; ``shaped``: it only changes shapes.
        given, result: PyTorch's stand-ins for its first tensor and its result.
        widest: of the floats that the module is given and owns.

    Raises:
        SparseError: whole numbers that could overflow.
    """
    if isinstance(made, list) or not isinstance(result, torch.Tensor) or not isinstance(made, View | Condition):
        return made
    dtype, before = result.dtype, given.dtype if isinstance(given, torch.Tensor) else result.dtype
    if dtype == torch.bool:
        return made if isinstance(made, Condition) else Condition(made, True)
    made = rec.truth(made) if isinstance(made, Condition) else made
    if not dtype.is_floating_point:
        if name == "sum" and before.is_floating_point:
            raise SparseError(f"numbers made {dtype} before they are summed", "make them whole first, and then sum")
        if dtype in _SMALL and not (shaped or name in _MOVED or before == torch.bool):
            raise SparseError(f"{dtype} may overflow, and is float64 here", "use int64, or floats")
        cut = name in ("to", "_to_copy", "type_as") and before.is_floating_point
        return rec.unary("trunc", made, "_whole") if cut else made
    if name in ("to", "_to_copy", "type_as"):
        narrower = BITS.get(dtype, 53) < (BITS.get(before, 53) if before.is_floating_point else 64)
        narrower &= before != torch.bool
    else:
        narrower = BITS.get(dtype, 53) < BITS.get(widest, 53) and not (shaped or name in _MOVED)
    return rounded(rec, made, dtype) if narrower else made


def rounded(rec: Recorder, x: View, dtype: torch.dtype) -> View:
    """Numbers as floats of a dtype hold them."""
    rec.narrowest = min(rec.narrowest, BITS[dtype])
    return rec.unary("cast", x, "_rounded", float(BITS[dtype]))

"""Steps that PyTorch runs between regions: operators that neither a stream nor a decomposition makes (a sort, an
inverse, a convolution). They read and give dense tensors, and no cycles are counted for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tilestream.errors import SparseError
from tilestream.sparse.outputs import OutputView, filled, spread
from tilestream.sparse.storage import SparseTensor, from_torch


@dataclass(frozen=True)
class Eager:
    """One result of an operator that PyTorch runs.

    Attributes:
        operator: its name, as ``aten.sort.default``.
        operands: how it sees the stored tensors that it reads, and the dtypes that they have for it (values here are
            float64).
        function: of the operands, dense; gives the result.
        source: the user's line.
    """

    operator: str
    operands: tuple[tuple[OutputView, torch.dtype], ...]
    function: Callable[..., torch.Tensor] = field(compare=False, repr=False)
    source: str = ""

    def __str__(self) -> str:
        return f"{self.operator} ({self.source})" if self.source else self.operator

    def run(
        self, name: str, shape: tuple[int, ...], tensors: Sequence[SparseTensor], fills: Sequence[float]
    ) -> SparseTensor:
        """The result as the program stores it: dense, without dimensions of size 1. ``fills``: by operand, 0 where
        they end.

        Raises:
            SparseError: PyTorch refuses the values.
        """
        absent = [*fills, *[0.0] * (len(tensors) - len(fills))]
        dense = [
            spread(view, filled(x, fill)).to(torch.float64 if dtype.is_floating_point else dtype)
            for (view, dtype), x, fill in zip(self.operands, tensors, absent, strict=True)
        ]
        try:
            with torch.no_grad():
                made = self.function(*dense)
        except (RuntimeError, IndexError, ValueError) as error:
            raise SparseError(f"{self}: {error}", "give the module values that it takes") from error
        return from_torch(name, made.detach().to(torch.float64).reshape(shape))

"""Rows and weights of odd width, copied with zeros behind their columns by one kernel of ours.

Inductor's own kernel for it moves an element a lane: 479 columns, 2,048 rows and a weight of 1,024, 3.4 us for 2.2; on
many rows it makes a kernel of each: 32,768 rows, 17.8 and 2.6 for 16.7 (H200).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_library = torch.library.Library("tilestream", "FRAGMENT")
_library.define("padded(Tensor[] matrices, SymInt columns) -> Tensor[]", tags=(torch.Tag.needs_exact_strides,))
PADDED = torch.ops.tilestream.padded.default
"""Of each matrix [rows, k] its copy [rows, columns], zeros behind its own; 16-bit elements on a GPU."""


def _eager(matrices: list[Tensor], columns: int) -> list[Tensor]:
    return [functional.pad(m, (0, columns - m.shape[1])).contiguous() for m in matrices]


def _cuda(matrices: list[Tensor], columns: int) -> list[Tensor]:
    from tilestream.cuda.pad import padded

    return padded(matrices, columns)


def _shapes(matrices: list[Tensor], columns: int) -> list[Tensor]:
    return [m.new_empty((m.shape[0], columns)) for m in matrices]


_library.impl("padded", _eager, "CompositeExplicitAutograd")
_library.impl("padded", _cuda, "CUDA")
torch.library.register_fake("tilestream::padded", _shapes, lib=_library)

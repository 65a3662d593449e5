"""The bf16 parts of float32 weights, all by one kernel (``include/weight_parts.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, LaneKernel, launch, text_of
from tilestream.ir.float32 import LARGEST, PAIRS
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_weight_parts"
WARPS = 8
"""Of a CTA, a row each."""

WEIGHT = Struct(
    "PartsWeight",
    (
        *pointers("from", type="const float*"),
        Field("void*", "to", note="bf16 [rows, 6 columns]"),
        Field("long long", "row_stride", note="elements from row to row, from column to column"),
        Field("long long", "column_stride"),
        Field("int", "rows"),
        Field("int", "columns"),
    ),
)


@cache
def kernel(weights: int) -> LaneKernel:
    """The kernel that makes those of so many."""
    argument = Struct("PartsParams", (Field(WEIGHT, "weights", weights),))
    order = "{" + ", ".join(str(of_weight) for _, of_weight in PAIRS) + "}"
    defines = {"WEIGHTS": weights, "COPIES": len(PAIRS), "PART_ORDER": order, "LARGEST": f"{LARGEST!r}f"}
    return LaneKernel(NAME, text_of("weight_parts.cuh", argument, defines), argument, WARPS)


def made(weights: Sequence[Tensor]) -> list[Tensor]:
    """Of each float32 weight [rows, columns] its parts side by side, bf16 [rows, 6 columns]."""
    planned = call(weights)
    launch(planned, weights[0].device)
    return list(planned.results)


def call(weights: Sequence[Tensor], address: Address = Tensor.data_ptr) -> LaneCall:
    """The launch of ``made``."""
    results = [w.new_empty(w.shape[0], len(PAIRS) * w.shape[1], dtype=torch.bfloat16) for w in weights]
    each = [
        {"from": address(w), "to": address(to), "row_stride": w.stride(0), "column_stride": w.stride(1)}
        | {"rows": w.shape[0], "columns": w.shape[1]}
        for w, to in zip(weights, results, strict=True)
    ]
    ctas = -(-sum(w.shape[0] for w in weights) // WARPS)
    return LaneCall(kernel(len(each)), ctas, {"weights": each}, results, list(weights))

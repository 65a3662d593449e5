"""The dtypes that pipelines know, by torch's names and by the IR's."""

from __future__ import annotations

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

INDEX_DTYPES = {"i32": torch.int32, "i64": torch.int64}
"""Of tensors that name the rows of another."""

ELEMENT_DTYPES = TORCH_DTYPES | INDEX_DTYPES

"""FLOPs of a call, as torch counts them, and of fused attention as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of scores and values, from the operands' shapes, for every head of queries. Several of these may share a head of
    keys, of which torch 2.11 makes an error."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


ATTENTION = {
    torch.ops.aten._scaled_dot_product_cudnn_attention: attention,
    torch.ops.aten._scaled_dot_product_efficient_attention: attention,
    torch.ops.aten._scaled_dot_product_flash_attention: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
}


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        call()
    return counter.get_total_flops()

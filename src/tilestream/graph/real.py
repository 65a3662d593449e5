"""Step out of a compilation: run real operations where torch has fake tensors and tracing switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def real(device: torch.device) -> Iterator[None]:
    """No fake tensors, no functionalisation, no gradients; CUDA work goes to ``device``."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield

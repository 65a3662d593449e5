"""What a user gets to see of a launch that waits for ever, in a process of its own: the CUDA context is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from tilestream.errors import QueueTimeout


def told_by(call: Callable[[], object]) -> int:
    """Print what ``call``, the synchronisation behind it and the next call say; 0 if that is a QueueTimeout, else 1."""
    call()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("the launch ends:", str(error).splitlines()[0])
    else:
        print("the launch did not stall")
        return 1
    try:
        call()
    except QueueTimeout as timeout:
        print(f"QueueTimeout: {timeout}")
        return 0
    print("the next call says nothing")
    return 1


def leave(code: int) -> None:
    """End the process: what torch's destructors make of a lost context is not tested here."""
    sys.stdout.flush()
    os._exit(code)

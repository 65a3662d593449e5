"""What reading and writing tensors costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """A memory model."""

    kind: str = "none"


NO_MEMORY = Memory()

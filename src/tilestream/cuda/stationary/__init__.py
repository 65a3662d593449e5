"""CUDA of stationary sums: gradients of weights and biases, kept in registers while the batch streams past."""

from __future__ import annotations

from tilestream.cuda.stationary.emit import StationarySource, emit

__all__ = ["StationarySource", "emit"]

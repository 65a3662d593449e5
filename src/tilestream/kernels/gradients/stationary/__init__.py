"""Stationary sums: gradients of weights and biases that stay in registers while the batch streams past.

``build`` turns a stage in plain form into a ``StationarySum``: which block of the gradient and which rows each CTA has,
and the ring of shared memory. Its ``VerifyError`` says why a pipeline is none.
"""

from __future__ import annotations

from tilestream.kernels.gradients.stationary.model import StationarySum, build, builds, is_stationary
from tilestream.kernels.gradients.stationary.sums import Sums, find_sums

__all__ = ["StationarySum", "Sums", "build", "builds", "find_sums", "is_stationary"]

"""Gradients of weights and biases that stay in registers while the batch streams past, alone or beside dX.

A stage is a chain of layers; sums alone are a chain of one layer whose dX nobody wants. ``builds`` turns the stages of
a launch in plain form into schedules: which CTA has which rows and which block of a sum, what a warpgroup keeps in
registers and a CTA in shared memory. Its ``VerifyError`` says why a pipeline has none.
"""

from __future__ import annotations

from tilestream.kernels.gradients.chain import Chain, Layer, find_chain
from tilestream.kernels.gradients.model import Schedule, builds, is_chain, is_gradients, room

__all__ = ["Chain", "Layer", "Schedule", "builds", "find_chain", "is_chain", "is_gradients", "room"]

"""Backward chains: dX from layer to layer on chip, and every layer's dW beside it, in one kernel of narrow layers.

``build`` turns a stage in plain form into a ``BackwardChain``, or a ``WideChain`` where a layer is wider than 64: what
a warpgroup keeps in registers, and a CTA in shared memory. Its ``VerifyError`` says why a pipeline is none.
"""

from __future__ import annotations

from tilestream.kernels.gradients.backward.build import build, room
from tilestream.kernels.gradients.backward.chain import Chain, Layer, find_chain
from tilestream.kernels.gradients.backward.model import BackwardChain, is_backward
from tilestream.kernels.gradients.backward.wide import WideChain

__all__ = ["BackwardChain", "Chain", "Layer", "WideChain", "build", "find_chain", "is_backward", "room"]

"""CUDA of backward chains: gradients go from layer to layer on chip, those of weights stay in registers."""

from __future__ import annotations

from tilestream.cuda.backward.emit import emit

__all__ = ["emit"]

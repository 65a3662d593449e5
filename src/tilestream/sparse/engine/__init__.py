"""The fast engine: the specification's values, tokens and cycles, from compiled kernels over rings of tokens."""

from __future__ import annotations

from tilestream.sparse.engine.run import run

__all__ = ["run"]

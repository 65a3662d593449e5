"""Kitsune's evaluation: whole models as operators, and how they run bulk-synchronously, fused, or as pipelines.

``design`` lists every pass by name. What it makes, ``Design.workload``, is what ``simulator.run`` takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilestream.studies.kitsune.designs import EXECUTIONS, PASSES, Design, design

__all__ = ["EXECUTIONS", "PASSES", "Design", "design"]


def __getattr__(name: str) -> Any:
    """Loaded when first used: the command line's help needs none of it."""
    if name in __all__:
        from tilestream.studies.kitsune import designs

        return getattr(designs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

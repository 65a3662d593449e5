"""Kitsune's evaluation: whole models as operators, and how they run bulk-synchronously, fused, or as pipelines.

``design`` lists every pass by name. What it makes, ``Design.workload``, is what ``simulator.run`` takes.
"""

from __future__ import annotations

from tilestream.kitsune.designs import EXECUTIONS, PASSES, Design, design

__all__ = ["EXECUTIONS", "PASSES", "Design", "design"]

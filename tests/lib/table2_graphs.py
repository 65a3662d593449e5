"""The operators of the rows of the paper's Table 2, for all tests of a process: a capture takes a second or more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.graphs import TABLE2_MODELS, table2_graph

_captured = cache(table2_graph)
_rows = {model: app for app, model in TABLE2_MODELS.items()}


def published(name: str, mode: str) -> OperatorGraph:
    """By the name of a row's application or of its model. Another graph each time: what is staged of one is kept."""
    return replace(_captured(_rows.get(name, name), mode), name=name)

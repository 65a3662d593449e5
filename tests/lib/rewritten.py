"""Rewrites of graphs, one at a time."""

from __future__ import annotations

import pytest
from torch import fx

from tilestream.graph.rewrites.settings import DEFAULT, Settings
from tilestream.graph.rewrites.sorted_sums import sort_sums
from tilestream.graph.rewrites.table import Run, When, rewrite
from tilestream.plan import find
from tilestream.plan.messages import sorted_sums
from tilestream.run import around


def normal(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph in its normal form."""
    rewrite(graph, When.NORMAL_FORM)
    return graph


def sort_messages(graph: fx.GraphModule) -> int:
    """Sums of messages in sorted order, where that pays; how many."""
    return rewrite(graph, sort_sums, Settings(sums=sorted_sums))


def counted(monkeypatch: pytest.MonkeyPatch, when: When) -> list[int]:
    """Gets how much compilations change from here on around regions, at ``when``."""
    found: list[int] = []

    def run(owner: fx.GraphModule, which: When | Run, settings: Settings = DEFAULT) -> int:
        made = rewrite(owner, which, settings)
        if which is when:
            found.append(made)
        return made

    monkeypatch.setattr(around, "rewrite", run)
    monkeypatch.setattr(find, "rewrite", run)
    return found

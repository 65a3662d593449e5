"""What may take the place of operators of a graph: operators of ours, and other ways to write them.

All are found, asked, predicted and put in place in one way. A further one is a ``Replacement`` in the table
``plan.replacements``, its operator (``graph.own``), and a trial that times it (``run.replacements``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.devices import Device
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.parts.source import BesideSource
from tilestream.options import Options
from tilestream.plan.chooser import Question, alternative, decide, kept


@dataclass(frozen=True)
class Replacement:
    """One way to compute what graphs have otherwise.

    Attributes:
        name: of the choice.
        instead: what an exception of ours costs, as it is announced.
        sites: where a graph has what may be replaced; nowhere where the options forbid it.
        kinds: of a site, on a device: frozen dataclasses of all that decides how long it takes. All must win.
        ours, library: what either way is counted to take for a kind.
        place: replaces a site, by what a device has; whether it could.
        sources: of the kernels that a kind needs.
    """

    name: str
    instead: str
    sites: Callable[[fx.Graph, Options], Sequence[Any]]
    kinds: Callable[[Any, Device], Sequence[Any]]
    ours: Callable[[Any, Device], Counts]
    library: Callable[[Any, Device], Counts]
    place: Callable[[fx.GraphModule, Any, Device], bool]
    sources: Callable[[Any, Device], Sequence[BesideSource]] = lambda _kind, _device: ()

    def question(self, kind: Any, device: Device, forced: bool = False) -> Question:
        """Whether a kind is computed so, or as it is."""
        predicted_us = self.ours(kind, device).us, self.library(kind, device).us
        return alternative(self.name, kind, device, predicted_us, forced)

    def place_expected(self, owner: fx.GraphModule, options: Options, device: Device) -> None:
        """Replace the sites that a compilation would: by times that are kept, else those predicted to be faster."""

        def wins(kind: Any) -> bool:
            asked = self.question(kind, device, options.target == "reference")
            timed = kept(asked, options, measured=True) if options.measure and options.strategy == "auto" else None
            return (timed or decide(asked)).wins

        for site in self.sites(owner.graph, options):
            if all(map(wins, self.kinds(site, device))):
                self.place(owner, site, device)


def dram(amount: float, device: Device) -> Amount:
    """Bytes that DRAM gives or takes."""
    return Amount("dram", amount, device.dram_bytes_per_s)


def launch(device: Device, times: float = 1.0) -> Amount:
    """So many launches, one after another."""
    return Amount("launch", times * device.launch_s)

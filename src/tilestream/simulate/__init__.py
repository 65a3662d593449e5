"""Discrete events over a Pipeline on a Device: time, spans of every worker, bytes and utilisation."""

from tilestream.simulate.spans import Simulation, Span

__all__ = ["Simulation", "Span"]

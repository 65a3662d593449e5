"""Gradients that PyTorch makes in several kernels: of LayerNorm, and of a table that was looked up."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.simulator.library.rows import SORTED, Rows, eager
from tilestream.simulator.library.streams import stream
from tilestream.simulator.workload import SimStage


def norm_gradient(over: Rows, device: Device, name: str, *, cached: float = 0.0) -> list[SimStage]:
    """Of LayerNorm: its rows', then those of its two vectors, which are sums over rows."""
    return [eager(kind, over, device, name, cached=cached) for kind in ("layer_norm", "norm_sums")]


def table_gradient(
    table_rows: int,
    looked_up: int,
    features: int,
    itemsize: int,
    device: Device,
    name: str,
    *,
    cached: float = 0.0,
) -> list[SimStage]:
    """Of a table: zeros for all of it, and the ``looked_up`` rows of ``features`` added."""
    whole, size = float(table_rows * features), float(looked_up * features * itemsize)
    kind = "table_gradient" if looked_up <= SORTED else "table_gradient sorted"
    return [
        stream(name, whole, 0.0, whole * itemsize, device, cached=cached),
        eager(kind, Rows(looked_up, features, size, size), device, name, cached=cached),
    ]

"""``tilestream bench queues``: hand-over between SMs by payload, depth and transport (Kitsune, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from tilestream.bench.environment import environment


def run(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure ring queues on the GPU present; about ten seconds after compiling.

    Raises:
        DeviceError: there is no GPU that the kernels run on.
    """
    from tilestream.bench import queue_pipeline

    return {"schema": 1, "environment": environment(), "queues": queue_pipeline.run(progress=progress)}


def render(result: dict[str, Any]) -> RenderableType:
    """One row a measurement, its columns as the measurement names them."""
    rows = result["queues"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in rows[0] if rows else ():
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    return table

"""Sizes at which the whole models run on a CPU in a moment."""

from __future__ import annotations

from tilestream.apps.models import MODELS

SMALL = {
    "nerf": {"rows": 40},
    "dlrm": {"batch": 12, "max_rows": 50},
    "mgn": {"nodes": 20, "edges": 60, "steps": 2},
    "graphcast_full": {"latitudes": 9, "longitudes": 16, "level": 1, "width": 16, "steps": 2},
    "graphcast_small": {"latitudes": 9, "longitudes": 16, "level": 1, "width": 16, "steps": 2},
    "graphcast_cut": {"nodes": 12, "edges": 40, "width": 16},
    **{
        name: {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 100}
        for name in MODELS
        if name.startswith("llama")
    },
}

"""The cases of README's tables: what is run, and what is wanted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.places import RESULTS


@dataclass(frozen=True)
class Case:
    """One result file. ``goal_us`` is the time to reach on an H200; None where only the other arms are the bar."""

    name: str
    model: str
    rows: int
    title: str
    strategy: str = "auto"
    goal_us: float | None = None
    counters: bool = False
    compile_time: bool = False

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def command(self, folder: Path = RESULTS) -> list[str]:
        """Arguments of the ``tilestream`` command that makes the result, in ``folder``, for the current folder."""
        path = os.path.relpath(folder / self.path.name)
        words = ["bench", self.model, "--rows", str(self.rows), "--strategy", self.strategy, "--json", path]
        words += [] if self.counters else ["--no-ncu"]
        return words + (["--compile-time"] if self.compile_time else [])


MAIN = (
    Case("chain", "chain", 262144, "8 x 256 linear + ReLU, vertical", "vertical", 440, counters=True),
    Case("chain_spatial", "chain", 262144, "8 x 256 linear + ReLU, spatial", "spatial", 580, counters=True),
    Case("nerf", "nerf", 262144, "NeRF", goal_us=550, compile_time=True),
    Case("nerf_small", "nerf", 16384, "NeRF", goal_us=60),
    Case("meshgraphnets", "meshgraphnets", 262144, "MeshGraphNets edge block", goal_us=130),
    Case("meshgraphnets_small", "meshgraphnets", 32768, "MeshGraphNets edge block", goal_us=22),
    Case("graphcast", "graphcast", 327680, "GraphCast edge block", goal_us=1300),
)

OTHERS = (
    Case("autoencoder", "autoencoder", 131072, "autoencoder 256-...-32-...-256"),
    Case("siren", "siren", 262144, "SIREN 5 layers, sin"),
    Case("sdf", "sdf", 262144, "distance field 128 wide, softplus"),
    Case("policy_value", "policy_value", 65536, "actor-critic 376-256-256, two heads"),
    Case("gated_ffn", "gated_ffn", 131072, "gated FFN 256, RMSNorm, residual"),
    Case("mixer", "mixer", 131072, "mixer MLP 128-512-128, GELU"),
    Case("tabular_resnet", "tabular_resnet", 131072, "tabular ResNet 128"),
    Case("dlrm_bottom", "dlrm_bottom", 65536, "DLRM bottom 13-512-256-128"),
    Case("two_tower", "two_tower", 131072, "two towers and a dot product"),
    Case("classifier", "classifier", 131072, "classifier 128-256-256-10, softmax"),
)

# The NeRF's bytes are counted in a run of their own, since the one above times first calls for a minute.
NERF_BYTES = Case("nerf_dram", "nerf", 262144, "NeRF", counters=True)
COUNTED = (*(case for case in MAIN if case.counters), NERF_BYTES)

CASES = {case.name: case for case in (*MAIN, *OTHERS, NERF_BYTES)}

"""DRAM bytes of one call, read from the GPU's counters by Nsight Compute in a process of its own."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIMEOUT_S = 300


def available() -> bool:
    return shutil.which("ncu") is not None


def measure(arm: str, target: str, arguments: Sequence[str]) -> dict[str, float] | str:
    """Bytes that one warm call of ``arm`` reads from and writes to DRAM.

    Args:
        arm: one of ``bench.arms.ARMS``.
        target: an app's name or ``FILE.py:FUNCTION``.
        arguments: further ones of ``python -m tilestream.bench.once``.

    Returns:
        ``{"read": bytes, "write": bytes, "kernels": number}``, or why there is no figure.
    """
    if not available():
        return "ncu is not installed"
    command = [
        *("ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"),
        *("--metrics", ",".join(METRICS), "--csv", "--print-units", "base"),
        *(sys.executable, "-m", "tilestream.bench.once", target, "--arm", arm, *arguments),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"ncu took more than {TIMEOUT_S} s"
    found = parse(done.stdout)
    if found is None:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return f"ncu gave no counters: {lines[-1] if lines else f'exit code {done.returncode}'}"
    return found


def parse(text: str) -> dict[str, float] | None:
    """Sum ncu's CSV over the kernels of a call; None where it holds no metric."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return None
    totals = {"read": 0.0, "write": 0.0}
    kernels = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name = row.get("Metric Name")
        if name in METRICS:
            totals["read" if name == METRICS[0] else "write"] += float(row["Metric Value"].replace(",", ""))
            kernels.add(row["ID"])
    return {**totals, "kernels": len(kernels)} if kernels else None

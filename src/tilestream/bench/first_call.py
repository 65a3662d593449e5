"""How long the first call of a compiled model takes: cold, with full caches in a second process, and torch's share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tilestream.errors import CompileError

TIMEOUT_S = 600


def measure(target: str, arguments: Sequence[str]) -> dict[str, float | dict[str, float]]:
    """Seconds of the first call of tilestream's arm in a process of its own, with empty caches and then with full ones.

    ``capture_s`` is the first call of ``torch.compile(backend="aot_eager")``, which imports and runs Dynamo and
    AOTAutograd and compiles nothing: a part of both that every back end pays. ``cold`` and ``warm`` say where the
    seconds went (``stopwatch``); ``torch`` is what no part of ours accounts for.

    Args:
        target: an app's name or ``FILE.py:FUNCTION``.
        arguments: ``--rows``, ``--dtype``, ``--strategy``, ``--target`` for that process.

    Raises:
        CompileError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(
            os.environ, TILESTREAM_CACHE_DIR=f"{folder}/ours", TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor"
        )
        cold, warm = (_run(target, arguments, environment) for _ in range(2))
        capture = _run(target, [*arguments, "--arm", "capture"], environment)
    return {
        "cold_s": cold["first_call_s"],
        "warm_s": warm["first_call_s"],
        "capture_s": capture["first_call_s"],
        "cold": cold["parts_s"],
        "warm": warm["parts_s"],
    }


def _run(target: str, arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tilestream.bench.first_call", target, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise CompileError(f"the first call failed: {lines[-1] if lines else 'no message'}", f"run {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the seconds from the first line of the call to its result; making the model is not counted."""
    import torch

    from tilestream.apps.load import load
    from tilestream.bench import arms
    from tilestream.bench.once import parser
    from tilestream.options import Options
    from tilestream.stopwatch import spent

    given = parser().parse_args()
    on = "cuda" if torch.cuda.is_available() and given.target != "reference" else "cpu"
    workload = load(given.model, given.rows, given.dtype, on)
    if on == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    arms.make(given.arm, workload.module, workload.inputs, Options(strategy=given.strategy, target=given.target))
    seconds, parts = time.perf_counter() - start, spent()
    print(json.dumps({"first_call_s": seconds, "parts_s": parts | {"torch": seconds - sum(parts.values())}}))


if __name__ == "__main__":
    main()

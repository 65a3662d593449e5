"""How long the first call of a compiled model takes: cold, with full caches in a second process, and torch's share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from tilestream.errors import CompileError

TIMEOUT_S = 600
# NVRTC keeps what it compiles too, since CUDA 12.9: in the driver's cache.
CACHES = ("TILESTREAM_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def measure(target: str, arguments: Sequence[str], has_byte_code: bool = False) -> dict[str, float | dict[str, float]]:
    """Seconds of the first call of tilestream's arm in a process of its own, with empty caches and then with full ones.

    A process more runs before them, so that every module has byte code, as an installer leaves it: without that, a
    cold call is a benchmark of Python's parser. ``capture`` is ``torch.compile(backend="aot_eager")``, which runs
    Dynamo and AOTAutograd and compiles nothing: a part of both that every back end pays. Of each, ``imports`` is the
    time of ``torch.compile`` itself, which loads Dynamo; the other parts (``stopwatch``) make up the call of the model,
    and ``torch`` is what no part of ours accounts for.

    Args:
        target: an app's name or ``FILE.py:FUNCTION``.
        arguments: ``--rows``, ``--dtype``, ``--strategy``, ``--target`` for that process.
        has_byte_code: spares the process that makes it.

    Raises:
        CompileError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        byte_code = dict(os.environ)
        if not has_byte_code:
            if byte_code.pop("PYTHONDONTWRITEBYTECODE", ""):  # whoever wants no files beside the sources gets none
                byte_code["PYTHONPYCACHEPREFIX"] = f"{folder}/python"
            _run(target, arguments, _caches(byte_code, f"{folder}/before"))
        environment = _caches(byte_code, f"{folder}/caches")
        cold, warm = (_run(target, arguments, environment) for _ in range(2))
        capture = _run(target, [*arguments, "--arm", "capture"], environment)
    seconds = {"cold": cold, "warm": warm, "capture": capture}
    return {f"{name}_s": sum(parts.values()) for name, parts in seconds.items()} | seconds


def _caches(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    return {**environment, **{variable: f"{folder}/{variable}" for variable in CACHES}}


def _run(target: str, arguments: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "tilestream.bench.first_call", target, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise CompileError(f"the first call failed: {lines[-1] if lines else 'no message'}", f"run {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the seconds of each part, from the call of ``torch.compile`` to the result of the model's first."""
    import torch

    from tilestream.apps.load import load
    from tilestream.bench import arms
    from tilestream.bench.once import parser
    from tilestream.options import Options
    from tilestream.run.stopwatch import spent

    given = parser().parse_args()
    on = "cuda" if torch.cuda.is_available() and given.target != "reference" else "cpu"
    workload = load(given.model, given.rows, given.dtype, on)
    if on == "cuda":
        torch.cuda.synchronize()
    options = Options(strategy=given.strategy, target=given.target)
    start = time.perf_counter()
    arm = arms.make(given.arm, workload.module, workload.inputs, options, workload.keywords)
    whole, parts = time.perf_counter() - start, spent()
    parts["imports"] = whole - arm.compile_s
    print(json.dumps(parts | {"torch": whole - sum(parts.values())}))


if __name__ == "__main__":
    main()

"""What a figure was made with: versions, GPU, driver, commit, command line."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from tilestream import __version__


def environment() -> dict[str, object]:
    """Versions and hardware for a result's JSON; what is not there is None."""
    gpu = torch.cuda.is_available()
    return {
        "tilestream": __version__,
        "commit": commit(),
        "command": command(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "nvrtc": _version("nvidia-cuda-nvrtc"),
        "driver": _driver() if gpu else None,
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "sms": torch.cuda.get_device_properties(0).multi_processor_count if gpu else None,
        "cpu": platform.processor() or platform.machine(),
    }


WRITTEN = ("--out", "--json", "--turns", "--side-by-side")
"""Options whose value says where a result goes, which is no part of how it was made."""


def command(words: Sequence[str]) -> str:
    """What to type to make a result again, from ``sys.argv``: the command or the benchmark, and what it was given."""
    given, rest = [], iter(words[1:])
    for word in rest:
        if word in WRITTEN:
            next(rest, None)
        elif word.split("=")[0] not in WRITTEN:
            given.append(word)
    path = Path(words[0]).resolve()
    benchmark = path.parent.parent.name == "benchmarks"
    begin = ["python", "-m", f"benchmarks.{path.parent.name}.{path.stem}"] if benchmark else ["tilestream"]
    return shlex.join([*begin, *given])


def commit() -> str | None:
    """The commit of this source tree, ``+`` at its end if the tree has changes.

    ``$TILESTREAM_COMMIT``, if it is set, for a copy of the tree on another machine. None outside a checkout.
    """
    if given := os.environ.get("TILESTREAM_COMMIT"):
        return given
    here = Path(__file__).parent
    head = _output("git", "-C", str(here), "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+" if _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no") else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _output(*command: str) -> str:
    """What a command prints, empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""

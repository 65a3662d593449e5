"""Cases of ``decoders.py`` in processes of their own, side by side, which take turns at the GPU.

The arms that take minutes to compile do so in further processes, and leave Inductor's caches behind: the process that
times a case goes on as soon as they are there, and without them where they would come too late.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.places import module_command

SLOW = ("max-autotune", "tilestream, max-autotune")
RESERVE_S = 9.0
"""Of the time that is left, what loading and timing take once an arm is there."""
COMMAND = module_command("run.decoders")


@dataclass(frozen=True)
class Elsewhere:
    """Where other processes say that an arm of this case is compiled, and how long that took."""

    folder: Path

    def wait(self, arm: str, left_s: Callable[[], float]) -> float | None:
        """Seconds of the first call in the other process; None where it would come too late."""
        while left_s() > RESERVE_S:
            if (found := self._file(arm)).exists():
                return float(json.loads(found.read_text(encoding="utf-8")))
            time.sleep(0.1)
        return None

    def say(self, arm: str, first_call_s: float) -> None:
        partial = self._file(arm).with_suffix(".part")
        partial.write_text(json.dumps(first_call_s), encoding="utf-8")
        partial.rename(self._file(arm))

    def _file(self, arm: str) -> Path:
        return self.folder / f"{arm}.json".replace(" ", "_")


def cases(words: Sequence[str]) -> list[tuple[str, int]]:
    """``NAME:BATCH`` as a pair each."""
    return [(name, int(batch)) for name, batch in (word.split(":") for word in words)]


def run(
    wanted: Sequence[tuple[str, int]],
    arms: Sequence[str],
    seconds: float,
    options: Sequence[str],
    turns: Path | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of every case, in the order in which the cases are given; those first in it have the processors first.

    Args:
        arms: of every case.
        seconds: until all processes end, whether they are through or not.
        options: of ``decoders.py``, for every process.
        turns: the folder of locks by which they take turns with processes of others, too.
    """
    end_s = time.time() + seconds
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder, timed = Path(name), []
        for rank, (model, batch) in enumerate(wanted):
            own = folder / f"{model}-{batch}"
            own.mkdir()
            common = [*COMMAND, "models", "--only", model, "--batch", str(batch), *options]
            common += ["--turns", str(turns or folder), "--elsewhere", str(own)]
            jobs = [["--arms", *arms, "--until", str(end_s - 1.0), "--out", str(own / "out")]]
            jobs += [["--arms", arm, "--compile-only", "--out", str(own / "none")] for arm in arms if arm in SLOW]
            processes = [subprocess.Popen(["nice", "-n", str(min(rank, 15)), *common, *job]) for job in jobs]
            for process in processes:
                ends.callback(_end, process)
            timed.append((processes[0], own / "out"))
        for process, out in timed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end_s - time.time()))
            yield json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()

"""``sorted_keys.cuh`` compiled by g++ as a library of this process: a lane is a fiber, a CTA has few of them.

``TILESTREAM_HOST_TSAN=1`` instruments it; Python then needs ``LD_PRELOAD=$(g++ -print-file-name=libtsan.so)``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from tilestream.cuda import sorted_keys
from tilestream.cuda.host.build import LANES_FILES, Mutation
from tilestream.kernels.parts.headers import headers

THREADS = 64
NAMES = ("count", "scatter", "starts", "few", "picked")


class OnHost:
    """The kernels, a CTA of ``THREADS``."""

    def __init__(self, folder: Path, *mutations: Mutation) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sorted_keys, "THREADS", THREADS)
            text = sorted_keys.text.__wrapped__()
        texts = headers() | {n: (files("tilestream.cuda.host") / n).read_text() for n in LANES_FILES}
        for m in mutations:
            texts[m.file] = m.apply(m.file, texts[m.file])
        launches = "".join(f"TS_LANES_LAUNCH(tilestream_{name}, KeyParams)\n" for name in NAMES)
        texts["main.cpp"] = f'{text}#include "lanes_run.h"\n{launches}'
        for name, written in texts.items():
            (folder / name).write_text(written)
        flags = [
            "-std=c++20",
            "-O1",
            "-g1",
            "-w",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
            f"-I{folder}",
        ]
        if os.environ.get("TILESTREAM_HOST_TSAN"):
            flags.append("-fsanitize=thread")
        library = folder / "sorted_keys.so"
        subprocess.run(["g++", *flags, str(folder / "main.cpp"), "-o", str(library)], check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))
        self.launched: list[str] = []

    def use(self, patch: pytest.MonkeyPatch, few: bool = False) -> None:
        """From now on ``cuda.sorted_keys`` sorts CPU tensors; ``few``: those of one tile by one launch."""
        patch.setattr(sorted_keys, "THREADS", THREADS)
        patch.setattr(sorted_keys, "TILE", 16 * THREADS)
        patch.setattr(sorted_keys, "FEW_NODES", 1 << 17 if few else 0)
        patch.setattr(sorted_keys, "CTAS", 3)
        patch.setattr(sorted_keys, "_enqueue", self._enqueue)
        patch.setattr(sorted_keys, "needs", sorted_keys.needs.__wrapped__)  # which knows other tiles

    def _enqueue(
        self,
        _: tuple[int, ...],
        made: Callable[[], Iterator[tuple[sorted_keys.Step, bytes]]],
        device: torch.device,
        clear: tuple[int, int] = (0, 0),
    ) -> None:
        ctypes.memset(clear[0], 0, 4 * clear[1])
        for step, packed in made():
            self.launched.append(step.name)
            getattr(self._library, f"launch_tilestream_{step.name}")(
                packed, step.ctas, THREADS, sorted_keys.SHARED_BYTES
            )

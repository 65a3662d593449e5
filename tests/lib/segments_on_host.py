"""``segments.cuh`` compiled by g++ as a library of this process, a thread for each of a CTA's, on CPU tensors.

``TILESTREAM_HOST_TSAN=1`` instruments it; Python then needs ``LD_PRELOAD=$(g++ -print-file-name=libtsan.so)``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch

from tilestream.cuda.host.build import Mutation
from tilestream.cuda.segments import text
from tilestream.kernels.parts.headers import headers

KERNELS = {"tilestream_sum": "SumParams"}

HEAD = """
#include <barrier>
#include <thread>
#include <vector>
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, gridDim;
static std::barrier<>* meeting;
static void __syncthreads() { meeting->arrive_and_wait(); }
namespace ts_host { void trap(const char*) { std::abort(); } }
"""

LAUNCH = """
// CTAs one after another, as they share what is __shared__.
extern "C" void launch_{kernel}(const {params}* p, int ctas, int threads) {{
  std::barrier<> all(threads);
  meeting = &all;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < threads; ++lane)
    lanes.emplace_back([=, &all] {{
      for (int cta = 0; cta < ctas; ++cta) {{
        threadIdx.x = lane, blockIdx.x = cta, gridDim.x = ctas;
        {kernel}(*p);
        all.arrive_and_wait();
      }}
    }});
  for (auto& lane : lanes) lane.join();
}}
"""


def launcher(folder: Path, *mutations: Mutation) -> Callable[..., None]:
    """What takes the place of ``cuda.segments._launch``.

    Args:
        folder: for sources and libraries.
        mutations: of ``segments.cuh``.
    """
    libraries: dict[str, ctypes.CDLL] = {}

    def launch(name: str, dtype: str, ctas: int, threads: int, packed: bytes, _: torch.device) -> None:
        if dtype not in libraries:
            libraries[dtype] = _built(folder / dtype, dtype, mutations)
        getattr(libraries[dtype], f"launch_{name}")(packed, ctas, threads)

    return launch


def _built(folder: Path, dtype: str, mutations: tuple[Mutation, ...]) -> ctypes.CDLL:
    own = {f.name: f.read_text() for f in files("tilestream.cuda.host").iterdir() if f.name.endswith((".h", ".cuh"))}
    texts = headers() | own
    for m in mutations:
        texts[m.file] = m.apply(m.file, texts[m.file])
    launches = "".join(LAUNCH.format(kernel=kernel, params=params) for kernel, params in KERNELS.items())
    texts["main.cpp"] = f'#include "ptx.cuh"\n{HEAD}{text(dtype)}{launches}'
    folder.mkdir(parents=True)
    for name, written in texts.items():
        (folder / name).write_text(written)
    flags = ["-std=c++20", "-O1", "-g1", "-w", "-fno-strict-aliasing", "-pthread", "-shared", "-fPIC", f"-I{folder}"]
    if os.environ.get("TILESTREAM_HOST_TSAN"):
        flags.append("-fsanitize=thread")
    library = folder / "segments.so"
    subprocess.run(["g++", *flags, str(folder / "main.cpp"), "-o", str(library)], check=True, timeout=300)
    return ctypes.CDLL(str(library))

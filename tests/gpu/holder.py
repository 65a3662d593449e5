"""A kernel that holds some of a GPU's SMs for a time, as a collective's does that waits for another GPU."""

from __future__ import annotations

import ctypes
import struct

import torch

from tilestream.cuda import driver
from tilestream.cuda.compile import compile_text

SHARED = 200_000
"""Bytes of a CTA: beside that an SM has no room for any of ours."""
THREADS = 32
TEXT = """
struct Params { unsigned long long ns; };
extern "C" __global__ void hold(const __grid_constant__ Params p) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < p.ns);
}
"""


class Holder:
    """Call it to hold ``sms`` SMs for ``us`` microseconds, on a stream of its own."""

    def __init__(self, sms: int, us: float) -> None:
        driver.ensure_context(0)
        self.sms, self.us, self.stream = sms, us, torch.cuda.Stream()
        self.function = driver.Function(compile_text(TEXT, "hold", SHARED).cubin, "hold", SHARED)

    def __call__(self) -> None:
        params = (ctypes.c_char * 8).from_buffer_copy(struct.pack("<Q", int(self.us * 1e3)))
        self.function.launch((self.sms, 1), THREADS, self.stream.cuda_stream, params)

"""Source to cubin with NVRTC, which needs neither a GPU nor a driver."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Protocol

from tilestream.errors import CompileError
from tilestream.kernels.parts.headers import included

# Warnings that mean a slow or wrong kernel: setmaxnreg ignored, wgmma serialised.
_FATAL = re.compile(r"C75\d\d")
BYTES_PER_REGISTER = 4


@dataclass(frozen=True)
class KernelReport:
    """What the compiler made of a kernel. ``spills`` counts bytes stored and loaded."""

    name: str
    cubin: bytes
    registers: int
    spills: int
    stack: int
    shared_bytes: int
    seconds: float
    log: str


class Source(Protocol):
    """A kernel to compile: its text, and the (consumer, loader) registers to try, the first without spills taken."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def register_splits(self) -> tuple[tuple[int, int], ...]: ...


def compile_split(source: Source, index: int) -> KernelReport:
    """The kernel with one of its register splits.

    Raises:
        CompileError: as ``compile_text``.
    """
    consumer, loader = source.register_splits[index]
    defines = {"CONSUMER_REGISTERS": consumer, "LOADER_REGISTERS": loader}
    return compile_text(source.text, source.name, source.shared_bytes, defines)


def is_settled(tried: Sequence[KernelReport | CompileError], splits: Sequence[tuple[int, int]]) -> bool:
    """Whether no split behind those that were tried, from the first on, is better.

    Where one spills more than the next one's further registers hold, none is: of eight kernels that spilled 76 bytes or
    more two spilled less with another split (716 bytes were 636, 236 were 204), and took more time.
    """
    *before, last = tried
    if isinstance(last, CompileError) or last.spills == 0:
        return True
    here, further = splits[len(before)][0], splits[len(tried) : len(tried) + 1]
    if any(last.spills > BYTES_PER_REGISTER * (consumer - here) for consumer, _ in further):
        return True
    return any(isinstance(other, KernelReport) and last.spills >= other.spills for other in before[-1:])


def best(tried: Sequence[KernelReport | CompileError]) -> KernelReport:
    """The split that spills least.

    Raises:
        CompileError: there is none, for the reason that the first was refused.
    """
    made = [report for report in tried if isinstance(report, KernelReport)]
    if not made:
        raise next(refused for refused in tried if isinstance(refused, CompileError))
    return min(made, key=lambda report: report.spills)


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """Version of NVRTC, or "none"."""
    try:
        import cuda.bindings.nvrtc as nvrtc

        return ".".join(str(v) for v in nvrtc.nvrtcVersion()[1:])
    except (ImportError, RuntimeError):
        return "none"


@lru_cache(maxsize=1)
def compiler_package() -> str:
    """Version of NVRTC's package, which the bindings look for first, else ``compiler_version``. To load the library
    takes 0.2 s, which a call whose kernels are all on disk need not spend."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return compiler_version()


def compile_text(text: str, name: str, shared_bytes: int, defines: dict[str, int] | None = None) -> KernelReport:
    """Compile CUDA C++ that may include our headers.

    Raises:
        CompileError: NVRTC is not installed, rejects the source, spills, or gives a C75xx warning.
    """
    try:
        import cuda.bindings.nvrtc as nvrtc
    except ImportError as e:
        raise CompileError(
            f"NVRTC's Python bindings are missing ({e})", "pip install 'tilestream[cuda]', or use target='reference'"
        ) from e
    start = time.perf_counter()
    include_names, texts = map(list, zip(*included(), strict=True))
    try:
        err, prog = nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), len(texts), texts, include_names)
    except RuntimeError as e:  # the bindings raise this when the library itself cannot be loaded
        raise CompileError(
            f"the NVRTC library cannot be loaded ({e})", "pip install nvidia-cuda-nvrtc of your CUDA version"
        ) from e
    _check(nvrtc, err)
    flags = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v", "-default-device"]
    flags += [f"-D{name}={value}" for name, value in (defines or {}).items()]
    options = [f.encode() for f in flags]
    (result,) = nvrtc.nvrtcCompileProgram(prog, len(options), options)
    log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, prog)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC refused kernel {name}: {log[:2000]}", "report this with the pipeline (--json)")
    cubin = _bytes(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, prog)
    nvrtc.nvrtcDestroyProgram(prog)
    report = KernelReport(
        name=name,
        cubin=cubin,
        registers=_number(r"Used (\d+) registers", log),
        spills=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        stack=_number(r"(\d+) bytes stack frame", log),
        shared_bytes=shared_bytes,
        seconds=time.perf_counter() - start,
        log=log,
    )
    if found := _FATAL.search(log):
        line = next(t for t in log.splitlines() if found[0] in t)
        raise CompileError(f"kernel {name} would run slowly: {line.strip()}", "choose another strategy; report this")
    return report


def _check(nvrtc, err) -> None:
    if err != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {err}", "check the installation of nvidia-cuda-nvrtc")


def _bytes(nvrtc, size_of, get, prog) -> bytes:
    err, size = size_of(prog)
    _check(nvrtc, err)
    # NVRTC writes into this object. Bytes of length one are shared by all of Python: an empty log (one zero) would turn
    # every b" " of the process into a zero, and f-strings that are compiled after that lose their single spaces.
    data = bytes(size + 1)
    (err,) = get(prog, data)
    _check(nvrtc, err)
    return data[:size]


def _text(nvrtc, size_of, get, prog) -> str:
    return _bytes(nvrtc, size_of, get, prog).rstrip(b"\0 ").decode(errors="replace")


def _number(pattern: str, log: str) -> int:
    found = re.findall(pattern, log)
    return max((int(f) for f in found), default=0)

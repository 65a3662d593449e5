"""Compile a pipeline's kernels with g++ against the host twin of ``ptx.cuh``, and run them with threads.

This is for tests: it executes the very source that NVRTC compiles, with the same rings, barriers, flags
and swizzled copies, and ThreadSanitizer can watch it. A CTA is six or seven threads. See docs/testing.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path

import torch

from tilestream.cuda import stamps
from tilestream.cuda.compile import Source
from tilestream.cuda.diagnose import Record
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.stamps import LaunchLog
from tilestream.errors import CompileError, TilestreamError
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.taps import ragged_sizes, rows_given
from tilestream.kernels.families import kernel_of
from tilestream.kernels.kernel import Kernel, Launchable
from tilestream.kernels.parts.headers import headers
from tilestream.kernels.parts.params import Where
from tilestream.kernels.parts.source import Call

TRAP, RACE = 42, 66  # exit codes: of the machine's trap, and of ThreadSanitizer
LANES_FILES = ("lanes.cuh", "lanes_run.h", "fibers.h", "ptx.cuh", "machine.h")
"""The host's machine of kernels that are written in lanes."""
MOST_CTAS = 4  # of a launch whose only stage may have any number
OF_FILE = 1 << 56
"""In an address of a kernel's argument: it is one of the launch's file (``fill`` of run.cuh)."""


class HostTrap(TilestreamError):
    """A kernel gave up on the host: a bounded wait expired, or a barrier was misused."""


class HostRace(TilestreamError):
    """ThreadSanitizer reported a data race; the cause holds its report."""


@dataclass(frozen=True)
class Mutation:
    """A textual change of one header or of the kernel, which must match exactly once."""

    file: str  # a header's name, or "kernel"
    old: str
    new: str

    def apply(self, name: str, text: str) -> str:
        if name != self.file:
            return text
        if text.count(self.old) != 1:
            raise CompileError(
                f"the mutation of {self.file} matches {text.count(self.old)} times: {self.old!r}", "update the mutation"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class HostRun:
    """How to build and run.

    ``launches``: times each kernel runs, one after another, on the same workspace. ``limit_s``: bound of a wait
    inside the machine, ``flag_limit_s`` of one for a flag. ``seed`` orders the copy engine's work, or lanes.
    """

    sanitize: bool = False
    launches: int = 1
    limit_s: float = 240.0
    flag_limit_s: float = 120.0
    seed: int = 0
    mutations: tuple[Mutation, ...] = ()
    folder: Path | None = None


@dataclass
class Arena:
    """Bytes of one launch's file: the kernel's argument, then everything that it addresses."""

    size: int = 1 << 14  # behind the argument
    parts: list[tuple[int, bytes]] = field(default_factory=list)

    def add(self, data: bytes, alignment: int = 256) -> int:
        at = -(-self.size // alignment) * alignment
        self.parts.append((at, data))
        self.size = at + len(data) + 64  # a gap: what is written past an end lands in nobody's data
        return at

    def where(self, t: torch.Tensor) -> Where:
        """A tensor, added: as a kernel is told of it."""
        return Where(OF_FILE + self.add(bytes_of(t)), t.stride(0) if t.dim() > 1 else 1, t.shape[0] if t.dim() else 1)

    def write(self, path: Path, params: bytes) -> None:
        with path.open("wb") as f:
            f.write(b"\xff" * self.size)
            f.seek(0)
            f.write(params)
            for at, data in self.parts:
                f.seek(at)
                f.write(data)


def run_on_host(
    pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], options: HostRun | None = None
) -> dict[str, torch.Tensor]:
    """Every output of a pipeline, computed by its generated kernels, whatever family they are of.

    Args:
        tensors: CPU tensors: inputs ``[rows, features]`` and parameters, by name.

    Raises:
        CompileError: g++ is missing or refuses the source.
        QueueTimeout: a flag wait expired; the message says who waited for what.
        HostTrap: another bounded wait expired, or a barrier was misused.
        HostRace: ThreadSanitizer saw a race.
        ValueError: it is a kernel that the host's machine cannot run (``Kernel.hosted``).
    """
    return _launches(pipeline, tensors, options or HostRun(), stamped=False)[0]


def stamped_on_host(
    pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], options: HostRun | None = None
) -> tuple[dict[str, torch.Tensor], list[LaunchLog]]:
    """As ``run_on_host``, by kernels with stamps, and what they wrote down. The clocks are those of this machine."""
    return _launches(pipeline, tensors, options or HostRun(), stamped=True)


def _launches(
    pipeline: Pipeline, tensors: Mapping[str, torch.Tensor], options: HostRun, stamped: bool
) -> tuple[dict[str, torch.Tensor], list[LaunchLog]]:
    logs: list[LaunchLog] = []
    rows = rows_given(pipeline, lambda name: tensors[name].shape[0])
    have, sizes = dict(tensors), ragged_sizes(pipeline, lambda name: tensors[name].shape[0])
    for launch in cut_at_dram(pipeline):
        for t in launch.by_role(Role.OUTPUT):
            shape = [sizes.get(a.name, rows) if a.size is None else a.size for a in t.axes]
            # NaNs: an element that nobody writes shows
            have[t.name] = torch.full(shape, float("nan"), dtype=TORCH_DTYPES[t.dtype])
        if rows or not kernel_of(launch).needs_rows:
            logs += _run(kernel_of(launch), stamped, have, rows, options)
    return {t.name: have[t.name] for t in pipeline.by_role(Role.OUTPUT)}, logs


def _run(
    kernel: Kernel, stamped: bool, tensors: dict[str, torch.Tensor], rows: int, options: HostRun
) -> list[LaunchLog]:
    """One launch, which changes the outputs among ``tensors``; its stamps, if it has them."""
    why = kernel.hosted(rows, options.sanitize)
    if why:
        raise ValueError(why)
    source, arena = kernel.source(stamped), Arena()
    lying = {t.name: tensors[t.name].t() if t.by_columns else tensors[t.name] for t in kernel.launch.tensors}
    where = {name: arena.where(t.contiguous()) for name, t in lying.items()}
    for t in kernel.buffers:
        where[t.name] = arena.where(torch.full((rows, t.features), float("nan"), dtype=TORCH_DTYPES[t.dtype]))
    copies = {f"packed {k}": bytes_of(pack(spec, tensors[spec.weight])) for k, spec in enumerate(kernel.packs)}
    at = {}
    for name, size in kernel.space.parts:
        first = b"\0" if name in kernel.space.zeros else b"\xff"
        at[name] = OF_FILE + arena.add(copies.get(name, first * size))
    grid = kernel.grid(rows, MOST_CTAS)
    room = stamps.capacity(source, rows, grid) if source.stamped else 0
    written = arena.add(b"\0" * stamps.buffer_bytes(grid, room)) if source.stamped else 0
    group = max(kernel.frame.cluster, *(s.group for s in kernel.launch.stages))
    run = runner(kernel, replace(source, text=kernel.host_text(source.text)), (grid, group), options)
    raw = bytearray()
    for part in kernel.parts(rows):
        limit_ns = int(options.flag_limit_s * 1e9)
        call = Call(where, at, 0, part, encoded, limit_ns, (OF_FILE + written, room))
        raw = run_call(kernel, source, call, arena, run)
    for t in kernel.launch.by_role(Role.OUTPUT):
        tensors[t.name] = left_at(raw, where[t.name].address - OF_FILE, tensors[t.name])
    if not source.stamped:
        return []
    return [stamps.read(raw[written : written + stamps.buffer_bytes(grid, room)], source, rows, grid, room)]


def runner(
    kernel: Launchable, source: Source, ctas: tuple[int, int], options: HostRun
) -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """What runs a kernel on an arena's file, by lanes or as a whole machine: ``ctas`` of a launch and of a cluster.

    Raises:
        CompileError: as ``built``.
    """
    frame = kernel.frame
    if frame.host_lanes:
        return in_lanes(source, ctas[0], frame.host_lanes, options, frame.together)
    program = compile_for_host(source, options)
    return partial(execute, program, source=source, ctas=ctas, options=options, warpgroups=frame.warpgroups)


def run_call(
    kernel: Launchable, source: Source, call: Call, arena: Arena, run: Callable[[Path], subprocess.CompletedProcess]
) -> bytearray:
    """The arena's bytes behind one launch, which its next one begins with; where it leaves a record is added.

    Raises:
        QueueTimeout, InputError: what its record says.
        HostTrap, HostRace: as ``run_on_host``.
    """
    dump = arena.add(b"\0" * (8 * kernel.frame.words))
    done, raw = run_file(arena, kernel.pack(source, call._replace(dump=OF_FILE + dump)), run)
    if kernel.frame.words:
        record = Record(kernel.frame.words, kernel.error)
        record.words.copy_(left_at(raw, dump, record.words))
        record.check()
    check_ended(source.name, done)
    arena.parts = [(first, bytes(raw[first : first + len(data)])) for first, data in arena.parts]
    return raw


def execute(
    program: Path, path: Path, source: Source, ctas: tuple[int, int], options: HostRun, warpgroups: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run a program of ``compile_for_host`` on an arena's file: ``ctas`` of a launch and of a cluster, consumer
    ``warpgroups`` of a CTA.

    Raises:
        HostTrap: it did not end.
        HostRace: ThreadSanitizer saw a race.
    """
    numbers = (*ctas, source.shared_bytes, options.launches, options.limit_s, options.seed, warpgroups)
    return run_program([str(program), str(path), *map(str, numbers)], source.name, options)


def run_program(command: list[str], name: str, options: HostRun) -> subprocess.CompletedProcess[str]:
    """Run the program of kernel ``name``; raises as ``execute``."""
    environment = dict(os.environ)
    if options.sanitize:
        environment["TSAN_OPTIONS"] = f"exitcode={RACE} halt_on_error=1 history_size=4 atexit_sleep_ms=0"
        # ThreadSanitizer's shadow needs an address space that is not randomised too far.
        command = [*fixed_addresses(), *command]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=600, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired as e:
        raise HostTrap(f"kernel {name} did not end within {e.timeout:.0f} s") from e
    if "ThreadSanitizer: data race" in done.stderr:
        raise HostRace(f"kernel {name} has a data race:\n{done.stderr[:6000]}")
    return done


def run_file(
    arena: Arena, params: bytes, run: Callable[[Path], subprocess.CompletedProcess[str]]
) -> tuple[subprocess.CompletedProcess[str], bytearray]:
    """What ``run`` says when it is given an arena's file, and that file's bytes behind it."""
    with tempfile.TemporaryDirectory(prefix="tilestream-host-") as scratch:
        path = Path(scratch) / "launch"
        arena.write(path, params)
        return run(path), bytearray(path.read_bytes())


def check_ended(name: str, done: subprocess.CompletedProcess[str]) -> None:
    """Raises ``HostTrap`` if the program of kernel ``name`` gave up."""
    if done.returncode:
        raise HostTrap(f"kernel {name} ended with code {done.returncode}: {done.stderr[-2000:]}")


def left_at(raw: bytearray, at: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like ``like``, whose elements lie without gaps, from byte ``at`` of a file."""
    if not like.numel():
        return like.clone()
    found = torch.frombuffer(raw, dtype=like.dtype, count=like.numel(), offset=at)
    return found.as_strided(like.shape, like.stride()).clone()


@lru_cache(maxsize=1)
def fixed_addresses() -> tuple[str, ...]:
    """Words to put before a command so that its address space is not randomised; none where that is not allowed."""
    tool = shutil.which("setarch")
    if tool is None:
        return ()
    probe = subprocess.run([tool, "-R", "true"], capture_output=True, check=False)
    return (tool, "-R") if probe.returncode == 0 else ()


def pack(spec, weight: torch.Tensor) -> torch.Tensor:
    """The padded copy of a weight, as ``pack.cuh`` writes it."""
    out = torch.full((spec.rows, spec.columns), float("nan"), dtype=weight.dtype)
    chunk = 128 // weight.element_size()
    for column, columns, at in spec.segments:
        out[:, at : at + columns] = weight[:, column : column + columns]
        out[:, at + columns : at + -(-columns // chunk) * chunk] = 0
    return out


def bytes_of(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- the compiler


def compile_for_host(source: Source, options: HostRun) -> Path:
    """An executable for one launch, from the cache folder if it is there.

    Raises:
        CompileError: g++ is missing or refuses the source.
    """
    flags = ["-std=c++20", "-fno-strict-aliasing", "-w"]
    own = {
        f.name: f.read_text()
        for f in files("tilestream.cuda.host").iterdir()
        if f.name.endswith((".h", ".cuh", ".cpp"))
    }
    texts = {k: v for k, v in headers().items() if k not in own} | own
    texts["kernel"] = source.text + f'\n#include "run.cuh"\nTS_MAIN({source.name})\n'
    mutate(texts, options.mutations)
    folder = (options.folder or default_folder()).resolve()  # a program's name is a hash of paths, too
    # The machine is not instrumented: it says itself what ThreadSanitizer is to see (clock.h).
    # A kernel runs for less time than it takes to compile; one that is watched does not.
    watch, instrument = (["-DTS_TSAN"], ["-fsanitize=thread", "-g1", "-O1"]) if options.sanitize else ([], ["-O0"])
    parts = {k: texts[k] for k in ("machine.cpp", "machine.h", "state.h", "copies.h", "products.h", "clock.h")}
    machine = built(folder, parts, "machine.cpp", [*flags, *watch, "-O2", "-c"], ".o")
    texts.pop("machine.cpp")
    return built(folder, texts, "kernel", [*flags, *instrument, "-pthread", str(machine)], "")


def in_lanes(
    source: Source, ctas: int, threads: int, options: HostRun, together: bool = False
) -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """What runs so many CTAs of a kernel of lanes against the host's ``lanes.cuh`` on an arena's file.

    Raises:
        CompileError: as ``built``.
    """
    texts = headers() | {n: (files("tilestream.cuda.host") / n).read_text() for n in LANES_FILES}
    texts["kernel"] = f'{source.text}\n#include "lanes_run.h"\nTS_LANES_MAIN({source.name})\n'
    mutate(texts, options.mutations)
    flags = ["-std=c++20", "-g1", "-O1", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"]
    if options.sanitize:
        flags.append("-fsanitize=thread")
    if together:  # CTAs wait for each other
        flags.append("-DTS_TOGETHER")
    folder = (options.folder or default_folder()).resolve()
    program = built(folder, texts, "kernel", with_system_headers(folder, texts, flags), "")
    numbers = (ctas, threads, source.shared_bytes, options.seed)
    return lambda path: run_program([str(program), str(path), *map(str, numbers)], source.name, options)


def mutate(texts: dict[str, str], mutations: Sequence[Mutation]) -> None:
    """Apply mutations to the files of a kernel.

    Raises:
        CompileError: one names no file of the kernel, or its text is not there exactly once.
    """
    for m in mutations:
        if m.file not in texts:
            raise CompileError(f"the mutation names {m.file!r}, which is no file of the kernel", "update the mutation")
        texts[m.file] = m.apply(m.file, texts[m.file])


def default_folder() -> Path:
    base = os.environ.get("TILESTREAM_CACHE_DIR")
    return (Path(base) if base else Path.home() / ".cache" / "tilestream") / "host"


def with_system_headers(folder: Path, texts: Mapping[str, str], flags: list[str]) -> list[str]:
    """Flags with which g++ finds the system's headers parsed: of a kernel of lanes, that was 0.7 s of 1.8 s.

    Raises:
        CompileError: as ``built``.
    """
    names = sorted(set(re.findall(r"^#include (<(?!sanitizer/).+>)", "\n".join(texts.values()), re.MULTILINE)))
    texts = {"system.h": "".join(f"#include {name}\n" for name in names)}
    header = built(folder, texts, "system.h", flags, ".h.gch").with_suffix("")
    return [*flags, "-include", str(header)]


def built(folder: Path, texts: Mapping[str, str], main: str, flags: list[str], suffix: str) -> Path:
    """The file that g++ makes of ``main`` among ``texts``, from the folder if it is there.

    Raises:
        CompileError: g++ is missing or refuses the source.
    """
    key = hashlib.sha256(repr((sorted(texts.items()), flags)).encode()).hexdigest()[:32]
    target = folder / f"{key}{suffix}"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CompileError("g++ is not installed", "install it (Debian: apt install g++), or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tilestream-host-", dir=folder) as scratch:
        for name, text in texts.items():
            (Path(scratch) / name).write_text(text)
        out = Path(scratch) / "out"
        # -x none: an object among the flags is no source
        objects = [f for f in flags if f.endswith(".o")]
        command = [
            compiler, *(f for f in flags if f not in objects), f"-I{scratch}",
            "-x", "c++-header" if suffix == ".h.gch" else "c++", str(Path(scratch) / main),
            "-x", "none", *objects, "-o", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"g++ refused {main}: {done.stderr[:3000]}", "report this with the pipeline (--json)")
        if suffix == ".h.gch":  # g++ looks for it beside the header
            os.replace(Path(scratch) / main, target.with_suffix(""))
        os.replace(out, target)
    return target

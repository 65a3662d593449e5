"""Machine code of a compiled kernel, and what must and must not be in it.

Each rule is a function that returns what it found wrong. They hold what the spikes measured, and what a
compiler may silently take back: registers spilled, a fence moved, a product serialised.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from tilestream.errors import CompileError
from tilestream.kernels.parts.source import KernelSource

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # with its modifiers: "LDG.E.64.STRONG.GPU"
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    def __str__(self) -> str:
        return f"{self.opcode} {self.operands} at {self.address:#x}"


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in the order of their addresses."""

    instructions: tuple[Instruction, ...]

    def having(self, *prefixes: str) -> list[Instruction]:
        """Instructions whose opcode starts with one of the prefixes."""
        return [i for i in self.instructions if i.opcode.startswith(prefixes)]

    def consumers(self) -> list[Instruction]:
        """What the consumer warpgroups run: from where they take registers to where the loaders give theirs back."""
        start = next((i.address for i in self.having("USETMAXREG.TRY_ALLOC")), None)
        end = next((i.address for i in self.having("USETMAXREG.DEALLOC")), None)
        if start is None or end is None:
            return []
        if start < end:
            return [i for i in self.instructions if start <= i.address < end]
        return [i for i in self.instructions if i.address >= start]


@lru_cache(maxsize=1)
def disassembler() -> Path | None:
    """cuobjdump of the PATH or of the wheel nvidia-cuda-cuobjdump; None if there is neither. It needs nvdisasm."""
    if found := shutil.which("cuobjdump"):
        return Path(found)
    try:
        listed = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(f.locate())) for f in listed if f.name in ("cuobjdump", "cuobjdump.exe"))
    return next((p for p in paths if p.exists()), None)


@lru_cache(maxsize=16)
def disassemble(cubin: bytes) -> Code:
    """The instructions of the one kernel in a cubin.

    Raises:
        CompileError: there is no disassembler, or it refuses the cubin.
    """
    tool = disassembler()
    if tool is None:
        raise CompileError("cuobjdump is not installed", "pip install nvidia-cuda-cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([str(tool), "-sass", f.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(
            f"cuobjdump failed: {done.stderr.strip()[:500]}",
            "pip install nvidia-cuda-nvdisasm, and check that the wheels match NVRTC's version",
        )
    return parse(done.stdout)


def parse(text: str) -> Code:
    return Code(tuple(Instruction(int(a, 16), op, rest.strip()) for a, op, rest in _INSTRUCTION.findall(text)))


# -- rules

Rule = Callable[[Code, KernelSource], list[str]]


def products_on_tensor_cores(code: Code, source: KernelSource) -> list[str]:
    """Every linear is a wgmma: without HGMMA a product was lowered to something else."""
    wanted = any(op.kind == "linear" for s in source.pipeline.stages for op in s.ops)
    return ["a linear, and no HGMMA"] if wanted and not code.having("HGMMA") else []


def tiles_by_tma(code: Code, source: KernelSource) -> list[str]:
    """Tiles and weights move by bulk tensor copies, in and out, where a tensor map was made for them."""
    kinds = {m.kind for m in source.tables.maps}
    out = []
    loads = any(op[0] >= 0 for op in source.tables.load_ops) or bool(source.tables.page_ops)
    if kinds and loads and not code.having("UTMALDG"):
        out.append("tensor maps to load from, and no UTMALDG")
    if source.tables.store_ops and not code.having("UTMASTG"):
        out.append("staged outputs, and no UTMASTG")
    return out


def registers_by_role(code: Code, source: KernelSource) -> list[str]:
    """setmaxnreg is there for both roles: ptxas drops it without a word where it cannot apply it."""
    missing = [o for o in ("USETMAXREG.TRY_ALLOC", "USETMAXREG.DEALLOC") if not code.having(o)]
    return [f"no {o}" for o in missing]


def queues_acquire_and_release(code: Code, source: KernelSource) -> list[str]:
    """Flags are read with acquire and published with release at gpu scope, with a proxy fence for the bulk copies.

    An acquire is a strong load and then an invalidation of the L1; a release is a MEMBAR and then a strong store.
    """
    if not source.tables.queues:
        return []
    out = []
    if not code.having("FENCE.VIEW.ASYNC.G"):
        out.append("queues, and no proxy fence for global memory")
    by_address = code.instructions
    for k, i in enumerate(by_address):
        if re.match(r"LDG\.E(\.64)?\.STRONG\.GPU", i.opcode):
            if not any(j.opcode.startswith("CCTL.IVALL") for j in by_address[k + 1 : k + 4]):
                out.append(f"a flag is read without acquire: {i}")
    published = [i for i in code.having("STG.E.64.STRONG.GPU") if i not in code.consumers()]
    for i in published:
        k = by_address.index(i)
        if not any(j.opcode.startswith("MEMBAR.ALL.GPU") for j in by_address[max(0, k - 8) : k]):
            out.append(f"a flag is published without release: {i}")
    if not published:
        out.append("queues, and no flag is published")
    return out


def no_local_memory(code: Code, source: KernelSource) -> list[str]:
    """A spilled register, or an array that is indexed at run time, is a memory access an element."""
    return [f"local memory: {i}" for i in code.instructions if i.name in ("LDL", "STL")]


def no_generic_addresses(code: Code, source: KernelSource) -> list[str]:
    """Shared memory is reached by 32-bit addresses: generic LD and ST cost 480 against 450 us on the 8x256 chain."""
    return [f"generic access: {i}" for i in code.instructions if i.name in ("LD", "ST")]


def consumers_never_wait_for_the_l2(code: Code, source: KernelSource) -> list[str]:
    """A gpu-scope barrier in a compute warp stalls it for the latency of the L2: loader warps do that."""
    inside = [
        i
        for i in code.consumers()
        if i.opcode.startswith(("MEMBAR.ALL.GPU", "MEMBAR.SC", "MEMBAR.ALL.SYS", "CCTL.IVALL"))
    ]
    return [f"in consumer code: {i}" for i in inside]


def consumer_barriers_belong_to_proxy_fences(code: Code, source: KernelSource) -> list[str]:
    """fence.proxy.async is MEMBAR.ALL.CTA and then FENCE.VIEW.ASYNC.S; any other MEMBAR was not asked for."""
    inside = code.consumers()
    return [
        f"in consumer code, without a proxy fence behind it: {i}"
        for k, i in enumerate(inside)
        if i.opcode.startswith("MEMBAR.ALL.CTA")
        and not any(j.opcode.startswith("FENCE.VIEW.ASYNC.S") for j in inside[k + 1 : k + 3])
    ]


def one_role_waits_at_a_named_barrier(code: Code, source: KernelSource | None = None) -> list[str]:
    """bar.sync is barrier.sync.aligned: all that wait at it do so by one instruction, and roles share none.

    Another role may arrive at it (BAR.ARV). Barrier 0 is the CTA's. Barriers of groups are numbered in registers.
    """
    inside = code.consumers()
    waits = [i for i in code.having("BAR.SYNC") if i.operands.startswith("0x") and not i.operands.startswith("0x0")]
    own = {i.operands for i in waits if i in inside}
    return [f"consumers wait at it too: {i}" for i in waits if i not in inside and i.operands in own]


_OPERANDS = re.compile(r"R\d+, R(\d+), gdesc")
_NO_RESULT = ("HGMMA", "ST", "RED", "BRA", "SYNCS", "BAR")


def loops_keep_their_operands(code: Code, source: KernelSource | None = None) -> list[str]:
    """A product in a loop over columns reads, turn after turn, registers that were written before the loop.

    ptxas of CUDA 13.0 takes two operands of equally many registers for one: what the second product of a turn reads is
    packed over what the first one needs again. ``kernels.stream.places`` keeps such an operand in shared memory.
    (Blocks that are held are no such loop: the last of them is packed over an operand that is done with.)
    """
    if source is not None and all(loop.held for s in source.pipeline.stages for loop in s.loops[1:]):
        return []
    out = []
    turns = [(int(i.operands.split()[-1], 16), i.address) for i in code.having("BRA") if "0x" in i.operands]
    for product in code.having("HGMMA"):
        found = _OPERANDS.search(product.operands)
        around = [(end - top, top, end) for top, end in turns if top <= product.address <= end]
        if found is None or not around:
            continue
        _, top, end = min(around)
        mine = {f"R{int(found[1]) + k}" for k in range(4)}
        written = [
            i.address
            for i in code.instructions
            if top <= i.address <= end
            and not i.opcode.startswith(_NO_RESULT)
            and re.split(r"[,.\s]", i.operands.strip())[0] in mine
        ]
        if written and min(written) > product.address:
            out.append(f"operand overwritten at {min(written):#x} before the next turn: {product}")
    return out


RULES: tuple[Rule, ...] = (
    products_on_tensor_cores,
    tiles_by_tma,
    registers_by_role,
    queues_acquire_and_release,
    no_local_memory,
    no_generic_addresses,
    consumers_never_wait_for_the_l2,
    consumer_barriers_belong_to_proxy_fences,
    one_role_waits_at_a_named_barrier,
    loops_keep_their_operands,
)


def lint(cubin: bytes, source: KernelSource) -> list[str]:
    """What every rule found wrong, each with the rule's name; empty if nothing.

    Raises:
        CompileError: as ``disassemble``.
    """
    code = disassemble(cubin)
    return [f"{rule.__name__}: {found}" for rule in RULES for found in rule(code, source)]

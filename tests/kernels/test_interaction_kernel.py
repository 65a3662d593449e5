"""Lookups and products of pairs: the kernels' text, run on the host with a fiber a lane, and compiled for sm_90a."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import sass
import torch
from host_runs import gxx, is_caught
from interactions import F16, Case

from tilestream.cuda import beside, driver
from tilestream.cuda import interaction as launched
from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.errors import InputError
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.interaction import BACKWARD, FORWARD, Kernel, lane_kernel
from tilestream.run import oracle

CASES = {
    "dlrm": Case(27, 128, 5),
    "one": Case(5, 40, 1, head=2, diagonal=True, twice=True),
    "f16, no head": Case(18, 24, 7, head=-1, dtype=F16),
    "many": Case(63, 8, 3, diagonal=True),
}
SMALL = Case(5, 24, 9, twice=True)
"""More samples than warps, so that each is followed by another."""


def run(kernel: str, case: Case, options: HostRun | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernel made, PyTorch's operators, and float64."""
    if kernel == FORWARD:
        return on_host(*case.operands(), head=case.head, options=options), *case.forward()
    given = case.given()  # gaps: its rows start on no 16 bytes
    given = torch.cat([given, given.new_ones(len(given), 3)], 1)[:, : given.shape[1]]
    return on_host(*case.operands(), given=given, options=options), *case.backward()


def on_host(
    sources, indices, first, second, head: int = -1, given=None, options: HostRun | None = None
) -> torch.Tensor:
    """Two CTAs of two warps: each lane is a thread."""
    name, dtype = FORWARD if given is None else BACKWARD, DTYPES[sources[0].dtype]
    kernel = Kernel(name, len(sources), sources[0].shape[1], len(first), head, dtype)
    lanes = lane_kernel(kernel, 2)
    made = partial(launched.call, kernel, lanes, sources, indices, first, second, given)
    return on_lanes(made, 2, options)[0]


@gxx
@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_values(kernel: str, name: str) -> None:
    got, eager, exact = run(kernel, CASES[name])
    error, own, good = oracle.judge([got], [eager], [exact])
    assert good, f"error {error:.2e}, eager's {own:.2e}"
    assert kernel == BACKWARD or torch.equal(got == 0, exact == 0)  # what is padded, exactly


@gxx
@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_lanes_do_not_race(kernel: str) -> None:
    got, eager, exact = run(kernel, SMALL, HostRun(sanitize=True))
    assert oracle.judge([got], [eager], [exact])[2]
    assert torch.equal(got, run(kernel, SMALL)[0])  # the same bits, equal pairs among them


HERE, MEET = "    lanes::copies_here();\n", "    lanes::together();\n"
MUTANTS = {
    "copies are not waited for": (FORWARD, f"{HERE}{MEET}    char*", "    char*"),
    "rows are read before all have come": (FORWARD, f"{HERE}{MEET}    char*", f"{HERE}    char*"),
    "products over rows that are read": (FORWARD, f"{MEET[2:-1]}  // everybody has read the rows\n", ""),
    "products are picked too early": (FORWARD, f"{MEET[2:]}}}\n\nTS_DEV void write_head", "}\nTS_DEV void write_head"),
    "the next rows over products": (FORWARD, f"rows, to);\n{MEET}", "rows, to);\n"),
    "the upper triangle": (FORWARD, "low = (u32)(at[0] < at[1] ? at[0] : at[1]);", "low = (u32)at[0];"),
    "gradients are read too early": (BACKWARD, f"{HERE}{MEET}    multiply", f"{HERE}    multiply"),
    "columns over columns": (BACKWARD, f"{MEET[:-1]}  // everybody has read these columns\n", ""),
    "rows leave too early": (BACKWARD, f"{MEET[2:]}}}\n\nTS_DEV void write_rows", "}\nTS_DEV void write_rows"),
    "the next rows over these": (BACKWARD, f"sample, rows);\n{MEET}", "sample, rows);\n"),
    "an equal pair is lost": (BACKWARD, "other != NO_OTHER;", "false;"),
    "the diagonal once": (BACKWARD, "low == high ? 2 * sum : sum", "sum"),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(6)
def test_mutants_are_caught(name: str) -> None:
    kernel, old, new = MUTANTS[name]
    case = Case(5, 24, 9, diagonal=True, twice=True)
    values = name in ("the upper triangle", "an equal pair is lost", "the diagonal once")

    def right(options: HostRun) -> bool:
        got, eager, exact = run(kernel, case, options)
        return oracle.judge([got], [eager], [exact])[2]

    assert is_caught(right, "interaction.cuh", old, new, races=not values)


@gxx
@pytest.mark.parametrize("bad", [-1, 54, 2**40])
def test_an_index_that_names_no_row(bad: int) -> None:
    sources, indices, *pairs = SMALL.operands()
    index = torch.zeros(SMALL.batch, dtype=torch.int64)
    index[4] = bad
    rows = len(sources[2])
    assert rows == 54
    with pytest.raises(InputError, match=f"sample 4 into table 2 of an interaction is {bad}, and it has {rows} rows"):
        on_host(sources, [*indices[:2], index, *indices[3:]], *pairs, 0)


@gxx
def test_a_pair_that_names_no_vector() -> None:
    sources, indices, first, second = SMALL.operands()
    first[3] = 5
    with pytest.raises(InputError, match="pair 3 of an interaction names vector 5, and there are 5"):
        on_host(sources, indices, first, second, 0)


SHAPES = [
    (27, 128, 351, 0, "bf16"),
    (27, 128, 351, 0, "f16"),
    (2, 8, 1, -1, "bf16"),
    (40, 64, 780, 3, "bf16"),
    (64, 256, 2080, 0, "bf16"),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
@pytest.mark.every(3)
def test_compiles_without_spills(name: str, shape: tuple[int, int, int, int, str]) -> None:
    vectors, features, pairs, head, dtype = shape
    kernel = Kernel(name, vectors, features, pairs, head, dtype)
    warps = kernel.warps
    made = compile_text(kernel.text(warps), name, kernel.shared_bytes(warps))
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * warps * kernel.resident(warps) <= 65536


@pytest.mark.nvrtc
@pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")
def test_machine_code_of_dlrms() -> None:
    """Every product of the lower triangle of blocks once, rows past the registers, no generic address, 24 warps."""
    kernel = Kernel(FORWARD, 27, 128, 351, 0)
    code = sass.disassemble(compile_text(kernel.text(8), FORWARD, kernel.shared_bytes(8)).cubin)
    assert len(code.having("HMMA.16816")) == 128 // 16 * 3 * 2
    assert len(code.having("LDSM")) == 128 // 16 * 2
    assert code.having("LDGSTS") and not code.having("LD.E", "ST.E", "LDL", "STL")
    assert kernel.warps * kernel.resident(kernel.warps) == 24


# -- the launch, with a driver that only takes note


class Noted:
    """Stands for a loaded kernel."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int], int, int]] = []

    def blocks_per_sm(self, threads: int) -> int:
        return 3 if threads == 256 else 1

    def prepare(self, grid: tuple[int, int], threads: int, stream: int, params: bytes, *_: bool) -> Callable[[], None]:
        return lambda: self.launches.append((grid, threads, len(params)))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    made = Noted()
    monkeypatch.setattr(beside, "compiled", lambda _: SimpleNamespace(cubin=b""))
    monkeypatch.setattr(driver, "ensure_context", lambda _: None)
    monkeypatch.setattr(driver, "Function", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    beside.loaded.cache_clear()
    return made


def test_as_many_ctas_as_there_are_samples_or_as_fit(noted: Noted) -> None:
    for batch, ctas in ((1, 1), (17, 3), (5000, 396)):
        case = Case(27, 128, batch)
        out, back = launched.forward(*case.operands(), 0), launched.backward(*case.operands(), case.given())
        assert out.shape == (batch, 480) and back.shape == (27, batch, 128)
        assert noted.launches[-2:] == [((ctas, 1), 256, 27 * 32 + 56)] * 2
    none = Case(27, 128, 0)
    assert launched.forward(*none.operands(), 0).shape == (0, 480) and len(noted.launches) == 6


def test_what_a_kernel_left_behind_is_raised_at_the_next_call(noted: Noted) -> None:
    operands = SMALL.operands()
    launched.forward(*operands, 0)
    record = beside.loaded(lane_kernel(Kernel(FORWARD, 5, 24, len(operands[2]), 0)), 0).record
    assert record is not None
    index = "the index of sample 7 into table 3 of an interaction is -4, and it has 50 rows"
    for what, told in ((3, index), (5, "pair 7 of an interaction names vector -4, and there are 50")):
        record.words[:] = torch.tensor([1, 7 << 32 | what, 50, -4])
        with pytest.raises(InputError, match=told):
            launched.forward(*operands, 0)
    record.words.zero_()
    assert len(noted.launches) == 1

"""Every kernel of the plans that the tests keep compiles for sm_90a without spills, and its machine code is linted."""

from __future__ import annotations

import re

import pytest
import sass
from programs import chain, edge_block, elementwise, nerf
from samples import spatial

from tilestream.cuda.cache import compiled
from tilestream.cuda.compile import KernelReport
from tilestream.devices import get
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Shard
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.stream.emit import emit
from tilestream.options import Options
from tilestream.plan.planner import plan

pytestmark = pytest.mark.nvrtc
needs_disassembler = pytest.mark.skipif(
    sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
)

PROGRAMS = {
    "chain8x256": lambda: chain(8, 256),
    "chain3x256": lambda: chain(3, 256),
    "chain3x64 f16": lambda: chain(3, 64, dtype="f16"),
    "chain2x128 f32": lambda: chain(2, 128, dtype="f32"),
    "nerf": nerf,
    "edge128": lambda: edge_block(128),
    "edge512": lambda: edge_block(512, 2, "silu"),
    "elementwise": elementwise,
}
CASES = [(program, strategy) for program in PROGRAMS for strategy in ("vertical", "spatial", "bulk")]
CASES.remove(("elementwise", "spatial"))  # one operator: nothing to spread over stages
CASES.remove(("chain8x256", "bulk"))  # a kernel a layer: the first, the last, and those between, which are all alike
CASES = [case for case in CASES if case[0] != "chain3x256" or case[1] == "bulk"]
# Both tests of a case run in one process, which compiles its kernels once; a kernel a layer are those of other models.
GROUPED = [
    pytest.param(*case, marks=pytest.mark.xdist_group("bulk" if "bulk" in case else "-".join(case)), id="-".join(case))
    for case in CASES
]


def _planned(program: str, strategy: str) -> Pipeline:
    made = plan(PROGRAMS[program](), 65536, get("h200"), Options(strategy=strategy)).chosen.pipeline
    if made is None:
        pytest.skip(f"no {strategy} pipeline for {program}")
    return made


_compiled: dict[tuple[object, ...], KernelReport] = {}


def _kernel(launch: Pipeline) -> tuple[KernelSource, KernelReport]:
    """Its source, and what was made of it or of one that is the same but for the name and comments."""
    source = emit(launch)
    text = re.sub(r"//.*", "", source.text).replace(source.name, "")
    key = text, source.shared_bytes, source.register_splits
    if key not in _compiled:
        _compiled[key] = compiled(source)
    return source, _compiled[key]


def _kernels(program: str, strategy: str) -> list[tuple[KernelSource, KernelReport]]:
    return [_kernel(launch) for launch in cut_at_dram(_planned(program, strategy))]


@pytest.mark.parametrize(("program", "strategy"), GROUPED)
@pytest.mark.every(8)
def test_compiles_without_spills(program: str, strategy: str) -> None:
    for source, report in _kernels(program, strategy):
        assert report.spills == 0 and report.stack == 0, f"{source.name}: {report.spills} bytes spilled\n{report.log}"
        assert "C75" not in report.log
        assert report.shared_bytes <= get("h200").shared_bytes_per_cta


@needs_disassembler
@pytest.mark.parametrize(("program", "strategy"), GROUPED)
@pytest.mark.every(4)
def test_machine_code(program: str, strategy: str) -> None:
    for source, report in _kernels(program, strategy):
        assert sass.lint(report.cubin, source) == [], source.name


@pytest.mark.smoke
@needs_disassembler
def test_weights_multicast_to_pairs() -> None:
    p = chain(3, 128)
    source, report = _kernel(p.with_stages((p.stages[0].with_(group=2, replicas=4),)))
    code = sass.disassemble(report.cubin)
    assert code.having("UTMALDG.2D.MULTICAST") and code.having("UCGABAR")
    assert sass.lint(report.cubin, source) == []


@needs_disassembler
def test_equal_stages_share_code() -> None:
    """Four equal stages are no longer than twice two: they are one function and a table."""
    few, many = (len(sass.disassemble(_kernel(spatial(n))[1].cubin).instructions) for n in (4, 8))
    assert many < 1.3 * few


# -- each rule finds what it is for


def _code(*lines: str) -> sass.Code:
    return sass.parse("\n".join(f"/*{16 * k:04x}*/  {line} ;" for k, line in enumerate(lines)))


def _source(pipeline: Pipeline | None = None) -> KernelSource:
    return emit(pipeline or chain(1, 64))


READ, DROP_L1 = "LDG.E.64.STRONG.GPU R2, desc[UR4][R4.64]", "CCTL.IVALL"
WRITE, DRAIN, PROXY = "STG.E.64.STRONG.GPU [R2], R4", "MEMBAR.ALL.GPU", "FENCE.VIEW.ASYNC.G"
TAKE, GIVE = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xd0", "USETMAXREG.DEALLOC.CTAPOOL 0x58"
MEET, ARRIVE, ALL = "BAR.SYNC.DEFER_BLOCKING 0x4, 0x120", "BAR.ARV 0x5, 0x120", "BAR.SYNC.DEFER_BLOCKING 0x0"
BREACHES = {
    sass.products_on_tensor_cores: ("FFMA R1, R2, R3, R1",),
    sass.tiles_by_tma: ("LDG.E R1, desc[UR4][R2.64]",),
    sass.registers_by_role: ("HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], R8",),
    sass.no_local_memory: ("@P0 STL [R1], R4",),
    sass.no_generic_addresses: ("LD.E R4, desc[UR4][R2.64]",),
    sass.consumers_never_wait_for_the_l2: (TAKE, DRAIN, GIVE),
    sass.consumer_barriers_belong_to_proxy_fences: (TAKE, "MEMBAR.ALL.CTA", "STS [R2], R4", "BAR.SYNC 0x1", GIVE),
    sass.one_role_waits_at_a_named_barrier: (TAKE, MEET, GIVE, MEET),
}


@pytest.mark.parametrize("rule", BREACHES, ids=lambda r: r.__name__)
def test_rule_finds_a_breach(rule: sass.Rule) -> None:
    assert rule(_code(*BREACHES[rule]), _source())


@pytest.mark.parametrize(
    "lines",
    [
        (PROXY, READ, "MOV R1, R2", DRAIN, WRITE),
        (PROXY, READ, DROP_L1, WRITE),
        (READ, DROP_L1, DRAIN, WRITE),
        (PROXY, READ, DROP_L1),
    ],
    ids=["acquire", "release", "proxy fence", "never published"],
)
def test_queue_rule_finds_what_is_missing(lines: tuple[str, ...]) -> None:
    assert sass.queues_acquire_and_release(_code(*lines), _source(spatial(2)))


def test_rules_accept_what_is_right() -> None:
    lines = (
        TAKE,
        "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], R8",
        "MEMBAR.ALL.CTA",
        "FENCE.VIEW.ASYNC.S",
        WRITE,
        *(ALL, MEET, ARRIVE),
        GIVE,
        *(ALL, MEET.replace("0x4", "0x5"), ARRIVE.replace("0x5", "0x4")),
        READ,
        DROP_L1,
        PROXY,
        "UTMALDG.2D [UR8], [UR4]",
        "UTMASTG.2D [UR4], [UR8]",
        PROXY,
        DRAIN,
        WRITE,
    )
    assert [r.__name__ for r in sass.RULES if r(_code(*lines), _source(spatial(2)))] == []


def test_split_columns_have_no_narrow_leftover() -> None:
    """A tile that one warpgroup holds alone is still one product: the other warpgroup has no columns."""
    p = chain(1, 64)
    source = emit(p.with_stages((p.stages[0].with_(placement=Shard(1)),)))
    assert "if (g == 0)" in source.text

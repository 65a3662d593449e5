"""Attention over the pairs of a mask: both kernels on the host against float64, and compiled."""

from __future__ import annotations

import pytest
import torch
from host_runs import gxx, is_caught
from masked_cases import BANDS, CASES, PACKED, Case, judged
from sass import disassemble, disassembler, loops_keep_their_operands

from tilestream.cuda import masked_attention
from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.masked_attention import Tiles, attention_call, attention_kernel, tiles_call, tiles_kernel
from tilestream.graph.masked.sites import FEATURES
from tilestream.kernels.parts.pairs import EVERY, OPS, PairMask, band


def tiles_on_host(case: Case, options: HostRun | None = None) -> Tiles:
    return Tiles(*on_lanes(lambda at: tiles_call(case.mask, case.read, case.blocks(), case.shape, at), options=options))


def attention_on_host(case: Case, tiles: Tiles | tuple[int, int], options: HostRun | None = None) -> torch.Tensor:
    query, key, value = case.operands()
    scale = case.sizes[-1] ** -0.5
    out = torch.empty_like(query)
    return on_lanes(lambda at: attention_call(query, key, value, tiles, scale, out, at, encoded), options=options)[0]


@gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_values(name: str) -> None:
    case = CASES[name]
    assert judged(attention_on_host(case, tiles_on_host(case)), case)


def band_on_host(case: Case, options: HostRun | None = None) -> torch.Tensor:
    assert case.mask.band is not None
    return attention_on_host(case, case.mask.band, options)


@gxx
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.every(2)
def test_bands(name: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not split:
        monkeypatch.setattr(masked_attention, "CTAS_SPLIT", 0)
    assert judged(band_on_host(BANDS[name]), BANDS[name])


def test_which_masks_are_bands() -> None:
    assert band(EVERY, 0).band == (EVERY, 0) and band(7, 3).band == (7, 3)
    for case in CASES.values():
        assert case.mask.band is None


@gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_tiles_are_known_by_what_is_kept_of_them(name: str) -> None:
    case = CASES[name]
    tiles, kept = tiles_on_host(case), case.kept()
    rows, columns = -(-kept.shape[2] // 64), -(-kept.shape[3] // 64)
    whole = torch.zeros(*kept.shape[:2], 64 * rows, 64 * columns, dtype=torch.bool)
    whole[..., : kept.shape[2], : kept.shape[3]] = kept
    some = whole.view(*kept.shape[:2], rows, 64, columns, 64).any(5).any(3)
    whole[:, :, kept.shape[2] :, : kept.shape[3]] = True  # rows behind the last one keep nobody from being whole
    every = whole.view(*kept.shape[:2], rows, 64, columns, 64).all(5).all(3)
    want = some.to(torch.uint8) + (some & every)
    assert torch.equal(tiles.states[:, :, :rows, :columns], want)
    assert not tiles.states[:, :, rows:].any() and not tiles.states[..., columns:].any()


def every_operator() -> PairMask:
    """Whether an odd number of results is odd, one of each operator, of negative numbers where it takes any."""
    lines: list[tuple[str | int, ...]] = [("sub", "q", "k"), ("lt", "k", 40)]
    results = []
    for name in OPS:
        of = {
            "constant": (7,),
            "floor_divide": ("v0", 3),
            "remainder": ("v0", -5),
            "where": ("v1", "q", "v0"),
            **dict.fromkeys(("neg", "abs", "bitwise_not", "logical_not"), ("v0",)),
        }.get(name, ("v0", "k"))
        lines.append((name, *of))
        lines.append(("remainder", f"v{len(lines) - 1}", 2))
        results.append(f"v{len(lines) - 1}")
    while len(results) > 1:
        lines.append(("bitwise_xor", results.pop(), results.pop()))
        results.append(f"v{len(lines) - 1}")
    return PairMask(tuple(lines))


@gxx
def test_every_operator_is_torchs() -> None:
    case = Case(every_operator(), (1, 1, 1, 70, 100, 16), listed=False)
    read = (torch.zeros(1),)  # the kernel is told the device by what it reads
    tiles = Tiles(*on_lanes(lambda at: tiles_call(case.mask, read, None, case.shape, at)))
    place = torch.arange(64)
    bits = tiles.bits[0, 0, :, :, :, None] >> place & 1
    got = bits.permute(0, 2, 1, 3).reshape(bits.shape[0] * 64, -1)[:70, :100]
    assert torch.equal(got.bool(), case.kept()[0, 0])


@pytest.mark.nvrtc
def test_every_operator_compiles() -> None:
    kernel = tiles_kernel(every_operator(), (), True)
    assert compile_text(kernel.text, kernel.name, kernel.shared_bytes).registers <= 65536 // (2 * 32 * kernel.warps)


@gxx
def test_warps_do_not_race() -> None:
    assert judged(band_on_host(BANDS["a window around"], HostRun(sanitize=True)), BANDS["a window around"])
    case = CASES["packed sequences of 128, f16"]
    tiles = tiles_on_host(case, HostRun(sanitize=True))
    assert judged(attention_on_host(case, tiles, HostRun(sanitize=True)), case)


MUTANTS = {
    "a tile of the other warpgroup's": ("entry >> (2 * g) & 3", "entry & 3"),
    "masks of whole tiles alone": ("if (!all) drop_others(s, kept);", ""),
    "old values keep their weight": ("TS_REG(out, k) *= TS_REG(before, k % 4 / 2)", "(void)TS_REG(before, k % 4 / 2)"),
    "the first batch's mask": ("batch * p.mask_batch + head", "head"),
    "heads of queries for keys": ("at.head / p.heads_a_key", "at.head"),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str) -> None:
    cases = CASES["holes"], CASES["a window"]

    def right(options: HostRun) -> bool:
        return all(judged(attention_on_host(case, tiles_on_host(case), options), case) for case in cases)

    assert is_caught(right, "masked_attention.cuh", *MUTANTS[name])


BAND_MUTANTS = {
    "keys behind the last": ("at + p.after < p.keys ? at + p.after : p.keys - 1", "at + p.after"),
    "a window's first key": ("~bits_below(at - p.before - from)", "~0u"),
    "whole tiles at a window's end": ("key >= last_query - p.before && ", ""),
    "sums that are not joined": ("ldsf(at + 512 * (4 * FEATURE_BLOCKS + 2 + j)) * other[j]", "0.0f"),
    "the tile before a window's": ("front > 0 ? front / KEYS : 0", "(front > 0 ? front / KEYS : 0) + 1"),
}


@gxx
@pytest.mark.parametrize("name", BAND_MUTANTS)
@pytest.mark.every(2)
def test_mutants_of_bands_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_attention, "CTAS_SPLIT", 0 if "whole" in name else masked_attention.CTAS_SPLIT)

    def right(options: HostRun) -> bool:
        return all(judged(band_on_host(case, options), case) for case in BANDS.values())

    assert is_caught(right, "masked_attention.cuh", *BAND_MUTANTS[name])


@pytest.mark.nvrtc
@pytest.mark.parametrize(("band", "split"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("features", "dtype"), [(16, "bf16"), (64, "bf16"), (64, "f16"), (80, "bf16"), (128, "bf16")])
@pytest.mark.every(2)
def test_compiles_to_tensor_cores_without_spills(features: int, dtype: str, band: bool, split: bool) -> None:
    kernel = attention_kernel(features, dtype, band, split)
    made = compile_text(kernel.text, kernel.name, kernel.shared_bytes)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * kernel.warps * (2 if features <= 64 else 1) <= 65536
    if disassembler() is not None:
        code = disassemble(made.cubin)
        assert code.having("HGMMA") and code.having("UTMALDG") and code.having("UTMASTG")
        assert not loops_keep_their_operands(code) and not code.having("LDL", "STL")


@pytest.mark.nvrtc
def test_masks_compile_without_spills() -> None:
    for listed in (False, True):
        kernel = tiles_kernel(PACKED, ("torch.int64",), listed)
        made = compile_text(kernel.text, kernel.name, kernel.shared_bytes)
        assert made.spills == 0 and made.stack == 0


def test_two_ctas_share_an_sm_where_heads_are_narrow() -> None:
    for features in FEATURES:
        resident = 2 if features <= 64 else 1
        assert (attention_kernel(features, "bf16", True, True).shared_bytes + 1024) * resident <= 228 * 1024
        assert (attention_kernel(features).shared_bytes + 1024) * resident <= 228 * 1024

"""Shared tiles without a GPU: schedules, refusals with their numbers, meaning, plans, kernels that compile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from places import DOCS
from shared_tiles import Ffn
from torch import nn

from tilestream import cuda, devices, reference
from tilestream.apps import llama
from tilestream.errors import VerifyError
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.derive import exchanges
from tilestream.ir.pipeline import Pipeline, Role, Tensor
from tilestream.ir.verify import verify
from tilestream.kernels.families import kernel_of
from tilestream.kernels.fits import verify_on
from tilestream.kernels.product.finder import find_block
from tilestream.kernels.product.shared_tile import Tail, build
from tilestream.kernels.product.sharing import Middle
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.options import Options
from tilestream.plan import few_rows, margins, planner
from tilestream.plan.candidates import Candidate
from tilestream.plan.passes.share_tile import Split, share_tile, tiles_for
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.run.backend import tilestream

H200 = devices.get("h200")
G4, G8 = Ffn(3072, 768, 768), Ffn(8192, 2048, 2048)
S2 = Ffn(5632, 2048, 2048, gated=True, act="silu")


def shared(block: Ffn, split: Split) -> Pipeline:
    made = share_tile(block.program(), split)
    verify(made)
    return made


def changed(p: Pipeline, **changes: object) -> Pipeline:
    return p.with_stages((replace(p.stages[0], **changes),))


# -- schedules


@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (16, 4), (32, 2), (64, 8)])
def test_products_of_a_gathered_middle_stay_in_shared_memory(rows: int, columns: int):
    """A product takes 64 rows of 16 columns, 2048 bytes, from where its columns begin. Of a shorter tile that reaches
    past the middle: the ring of weights lies behind it, not the end of shared memory."""
    split = Split(8, columns, middle=Middle.DSM, tile_rows=rows)
    source = kernel_of(share_tile(Ffn(1000, 264, 328).program(), split)).source()
    at = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)[,;]", source.text)}
    gathered = source.tables.s.gather_bytes
    assert gathered == 2 * rows * 128 * -(-columns * at["MIDDLE"] // 128)
    assert at["GATHER"] % 128 == at["WEIGHTS"] % 1024 == 0
    assert at["LEFT_STAGES"] * source.tables.s.left_bytes <= at["GATHER"] == at["WEIGHTS"] - gathered
    last = at["GATHER"] + gathered - 16 * 2 * rows
    assert last + 2048 <= at["WEIGHTS"] + at["WEIGHT_STAGES"] * at["WEIGHT_BYTES"] <= at["SCATTER"] <= at["BARS"]


@pytest.mark.parametrize(
    ("block", "split", "columns", "rings"),
    [
        (G4, Split(8, 16), (24, 48), (128, 4, 8)),
        (G8, Split(8, 16), (64, 128), (64, 7, 7)),
        (Ffn(16384, 4096, 4096), Split(4, 32), (128, 128), (64, 7, 7)),
        (S2, Split(8, 16), (48, 128), (64, 7, 7)),
        (G4, Split(8, 16, tile_rows=64), (24, 48), (128, 7, 9)),
        (G4, Split(8, 16, tile_rows=8), (24, 48), (128, 9, 9)),
        (G8, Split(2, 64, tile_rows=16), (64, 32), (128, 16, 10)),
    ],
)
def test_columns_and_rings_follow_from_the_mesh(block: Ffn, split: Split, columns, rings) -> None:
    p = shared(block, split)
    s = build(p.stages[0], p)
    assert kernel_shape(p.stages[0]) is KernelShape.SHARED_TILE
    assert (s.middle_columns, s.out_columns) == columns
    assert (s.depth, s.left_stages, s.weight_stages) == rings
    assert s.shared_bytes == sum(size for _, size in s.parts) <= H200.shared_bytes_per_cta
    assert s.ctas == split.ctas <= H200.sms
    verify_on(p, H200)


def test_a_middle_over_a_cluster_is_an_all_gather_of_the_mesh() -> None:
    p = shared(G4, Split(12, 8, middle=Middle.DSM))
    s = build(p.stages[0], p)
    assert (s.middle, s.cluster, s.gather_bytes) == (Middle.DSM, 8, 256 * 128 * 2)
    assert (Level.CLUSTER, "all-gather") in {(e.level, e.how) for e in exchanges(p.stages[0])}
    assert s.left_stages <= s.left_steps == 12 and s.shared_bytes <= H200.shared_bytes_per_cta
    verify_on(p, H200)
    with pytest.raises(VerifyError, match="128 / 8 = 16 clusters of 8 > 15 that h200 holds at once"):
        verify_on(shared(G4, Split(16, 8, middle=Middle.DSM)), H200)
    with pytest.raises(VerifyError, match="32 = 32 > 16 workers at level 'cluster'"):
        verify_on(shared(G4, Split(1, 32, Tail.NONE, middle=Middle.DSM)), H200)


def test_where_each_makes_the_middle_only_sums_are_exchanged() -> None:
    p = shared(Ffn(512, 416, 256), Split(4, 4, Tail.CLUSTER, 32, 4, middle=Middle.NONE))
    s = build(p.stages[0], p)
    assert (s.middle, s.cluster, s.middle_columns, s.out_columns) == (Middle.NONE, 4, 128, 64)
    assert s.alone and s.gather_bytes == 128 * 32 * 2
    assert {(e.level, e.how) for e in exchanges(p.stages[0])} == {(Level.CLUSTER, "reduce-scatter")}
    handed = shared(Ffn(512, 416, 256), Split(4, 4, Tail.CLUSTER, 32, 4))
    assert not build(handed.stages[0], handed).alone
    verify_on(p, H200)


def test_a_sum_that_does_not_fill_its_stage_ends_where_it_ends() -> None:
    """32 columns are two steps of a product and one panel of a copy, whatever a stage holds."""
    for k, depth, panels in ((32, 32, 64), (112, 112, 128), (120, 128, 128), (416, 128, 128)):
        text = kernel_of(shared(Ffn(512, k, 256), Split(4, 8))).source().text
        assert f"FIRST_DEPTH = {depth}, FIRST_PANELS = {panels}," in text


@pytest.mark.parametrize("tail", [Tail.PARTIALS, Tail.REDUCE_ADD, Tail.CLUSTER])
def test_the_tail_follows_from_the_mesh(tail: Tail) -> None:
    p = shared(G4, Split(4, 16, tail))
    assert build(p.stages[0], p).tail is tail
    how = {(e.level, e.how) for e in exchanges(p.stages[0])}
    assert (Level.GRID, "all-gather") in how
    assert ((Level.CLUSTER, "reduce-scatter") in how) is (tail is Tail.CLUSTER)
    assert ((Level.GRID, "reduce-scatter") in how) is (tail is Tail.PARTIALS)


def refusals() -> list[tuple[Pipeline, str]]:
    good = shared(G4, Split(8, 16))
    rows, columns = Loop("rows", 128), good.stages[0].mesh[0]
    out, hid = columns.axes

    def mesh(*directions: Spread) -> Pipeline:
        return changed(good, mesh=directions)

    return [
        (changed(good, loops=(Loop("rows", 96),)), "96 rows a tile, a shared tile 8, 16, 32, 64 or 128"),
        (changed(good, loops=(rows, Loop(out, 48))), f"loops over '{out}', which its mesh divides"),
        (changed(good, loops=(rows, Loop("a.c", 32))), "in steps of 32, a ring stage holds 64, 128 or 256"),
        (
            mesh(Spread(Level.CLUSTER, 8, columns.axes), Spread(Level.CLUSTER, 2, (hid, out))),
            "a cluster of 2 x 8 CTAs that",
        ),
        (mesh(columns, Spread(Level.CLUSTER, 2, ("rows",))), "row tiles over a cluster have no kernel"),
        (
            shared(Ffn(4096, 768, 768), Split(4, 8, middle=Middle.DSM)),
            r"3 x \(16384 \+ 16384\) \+ 263168 = 361472 > 232448 .* \(262144 of them the middle of 8 CTAs\)",
        ),
        (mesh(columns, Spread(Level.GRID, 8, (hid,))), "one group would store the sum of 8 partial results"),
        (mesh(columns, columns), "two directions of columns"),
        (mesh(Spread(Level.CLUSTER, 4, (out,))), "divide .* alone, and exchange nothing"),
        (mesh(columns, Spread(Level.GRID, 2, ("a.c", hid))), "a direction over a.c, .* is none of a shared tile's"),
        (mesh(Spread(Level.GRID, 2, columns.axes)), "each CTA makes 1536 > 256 columns of the middle"),
        (shared(Ffn(3072, 772, 768), Split(8, 16)), "772 x 2 = 1544 bytes along .* are no multiple of 16"),
        (shared(Ffn(768, 192, 192, bias=True), Split(4, 8, Tail.REDUCE_ADD)), "adds partial results in memory, but"),
    ]


@pytest.mark.parametrize(("pipeline", "why"), refusals(), ids=[why for _, why in refusals()])
def test_what_has_no_kernel_is_told_the_numbers(pipeline: Pipeline, why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        build(pipeline.stages[0], pipeline)
    with pytest.raises(VerifyError, match="no kernel can be made of pipeline 'ffn'"):
        cuda.sources(pipeline)


def test_rings_that_do_not_fit_are_told_the_numbers() -> None:
    p = shared(G4, Split(8, 16))
    with pytest.raises(VerifyError, match=r"3 x \(16384 \+ 6144\) \+ 1024 = 68608 > 60000 bytes of shared memory"):
        build(p.stages[0], p, 60_000)


def test_more_clusters_than_are_resident_are_refused() -> None:
    with pytest.raises(VerifyError, match="128 / 8 = 16 clusters of 8 > 15 that h200 holds at once"):
        verify_on(shared(G4, Split(8, 16, Tail.CLUSTER)), H200)
    with pytest.raises(VerifyError, match="1 x 9 x 16 = 144 CTAs > 132 SMs"):
        share_tile(G4.program(), Split(9, 16), H200)


def test_other_programs_are_no_blocks() -> None:
    program = Ffn(768, 768, 768).program()
    *ops, store = program.stages[0].ops
    seen = Tensor.of("seen", Role.OUTPUT, (768,), "bf16")
    both = replace(program, tensors=(*program.tensors, seen)).with_stages(
        (replace(program.stages[0], ops=(*ops, replace(store, tiles=("h",), tensors=("seen",)), store)),)
    )
    with pytest.raises(VerifyError, match="it stores 2 results of two layers"):
        share_tile(both, Split(8, 16))


def test_the_example_of_the_page() -> None:
    page = (DOCS / "few-rows.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/few-rows.md", "exec"), {})


# -- meaning


@pytest.mark.parametrize(
    "split",
    [
        Split(3, 2),
        Split(3, 2, Tail.REDUCE_ADD),
        Split(3, 2, Tail.CLUSTER),
        Split(1, 4),
        Split(3, 2, middle=Middle.DSM),
    ],
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True])
def test_the_reference_machine_computes_the_block(split: Split, gated: bool) -> None:
    block = Ffn(48, 24, 40, gated=gated, act="silu")
    tensors = {n: t.double() for n, t in block.tensors(20).items()}
    moved = Moved()
    p = shared(block, split)
    got = run_meshes(p, tensors, FLOAT64, moved)["y"]
    torch.testing.assert_close(got, block.eager(tensors), rtol=1e-12, atol=1e-12)
    if split.tail is Tail.CLUSTER:
        assert moved.bytes["dsm"] == (split.groups - 1) * 20 * 40 * 4
    if split.middle is Middle.DSM:
        assert moved.bytes["dsm"] == (split.columns - 1) * 20 * 48 * 2
    near = reference.run(p, block.tensors(20))["y"].double()
    assert (near - block.eager(tensors)).norm() < 0.02 * near.norm()


@pytest.mark.parametrize("split", [Split(3, 2), Split(3, 2, Tail.CLUSTER), Split(1, 4)], ids=str)
@pytest.mark.parametrize(
    "block",
    [
        Ffn(48, 24, 40, norm="layer"),
        Ffn(48, 24, 24, norm="rms", residual=True),
        Ffn(48, 24, 24, gated=True, act="silu", norm="rms", sum_first=True, residual=True),
    ],
    ids=str,
)
def test_what_is_in_front_and_behind_belongs_to_the_tile(block: Ffn, split: Split) -> None:
    tensors = {n: t.double() for n, t in block.tensors(20).items()}
    p = shared(block, split)
    torch.testing.assert_close(run_meshes(p, tensors, FLOAT64, Moved())["y"], block.eager(tensors))
    found = find_block(p.stages[0], p)
    assert found.input == "" and found.before and found.k not in found.outs
    assert len([op for op in found.after if op.kind == "load"]) == block.residual * (1 + block.sum_first)


def test_a_residual_that_is_a_norms_result_is_left_outside() -> None:
    """It would have to be read by rows in front of the first layer and by columns behind the second."""
    program = replace(Ffn(48, 24, 24), norm="rms", residual=True).program()
    (stage,) = program.stages
    ops = tuple(op.reading({"a": "even"}) if op.kind == "add" else op for op in stage.ops)
    with pytest.raises(VerifyError, match="a shared tile is act"):
        share_tile(program.with_stages((replace(stage, ops=ops),)), Split(3, 2))


# -- plans


ANY_ORDER = Options(any_order=True)


def names(rows: int, block: Ffn = G4, options: Options = ANY_ORDER) -> list[str]:
    made = planner.plan(block.program(), rows, H200, options)
    return [c.detail for c in made.candidates if c.strategy == few_rows.STRATEGY and c.pipeline is not None]


def test_few_rows_of_a_wide_block_have_candidates_with_every_tail() -> None:
    found = names(128)
    assert {"sums added in any order", "partial sums in order", "sums over a cluster", "sums in one place"} == {
        n.split(", ")[-1] for n in found
    }
    assert planner.plan(G4.program(), 128, H200, Options()).chosen.strategy == few_rows.STRATEGY
    assert names(4096) == []


def test_sums_in_any_order_are_left_out_where_nobody_asks_for_them_or_torch_for_the_same_bits() -> None:
    assert not any("any order" in name for name in names(128, options=Options()))
    torch.use_deterministic_algorithms(True)
    try:
        assert not any("any order" in name for name in names(128))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_middle_over_a_cluster_is_a_candidate_of_few_rows_where_timed() -> None:
    default = Options()

    def gathered(rows: int, options: Options) -> list[str]:
        return [n for n in names(rows, options=options) if "middle over a cluster" in n]

    for rows in (1, 16, 64):
        assert len(gathered(rows, default)) >= margins.SHARED_EACH
        assert all("partial sums" in n for n in gathered(rows, default) if " x " not in n)
    without = default.with_(cluster_middle=False)
    for options in (without, default.with_(effort="model"), default.with_(measure=False)):
        assert gathered(16, options) == []
    normed = replace(G4, norm="layer")
    assert not any("middle over" in n for n in names(16, normed, default))
    assert all(" x " in n for n in gathered(128, default))  # tiles of 64 rows or fewer, side by side
    assert any(" x " not in n for n in gathered(128, default.with_(effort="exhaustive")))
    plain, other = (planner.question(G4.program(), 16, H200, o).key(measured=False) for o in (without, default))
    assert plain != other


def test_something_done_to_the_sum_needs_it_whole() -> None:
    assert not any("any order" in name for name in names(128, replace(G4, bias=True)))


def test_bins_of_rows() -> None:
    same = partial(few_rows.same_bin, G4.program())
    assert [tiles_for(n) for n in (1, 8, 9, 17, 64, 65, 128, 129, 256, 257, 512)] == [
        (8, 1), (8, 1), (16, 1), (32, 1), (64, 1), (128, 1), (128, 1), (128, 2), (128, 2), (128, 4), (128, 4),
    ]  # fmt: skip
    assert same(1, 8) and not same(8, 9) and not same(64, 65)
    assert same(5000, 600) and not same(512, 513)


def test_plans_on_disk_are_by_bin() -> None:
    keys = [
        planner.question(G4.program(), rows, H200, Options()).key(measured=False) for rows in (1, 8, 9, 64, 65, 128)
    ]
    assert keys[0] == keys[1] != keys[2] and keys[2] != keys[3] != keys[4] == keys[5]
    assert planner.question(G4.program(), 8, H200, Options(effort="model")).key(measured=False) != keys[0]


def test_effort_decides_how_many_kernels_are_timed() -> None:
    timed: list[list[str]] = []

    def measure(candidates: Sequence[Candidate]) -> list[float | Exception]:
        timed.append([c.name for c in candidates])
        return [100.0 + k if c.pipeline is None else 10.0 + k for k, c in enumerate(candidates)]

    counts = {}
    for effort in ("model", "measured", "exhaustive"):
        timed.clear()
        planner.plan(G4.program(), 128, H200, Options(any_order=True, effort=effort), measure)
        counts[effort] = sum("group" in name for name in timed[0])
    assert counts["model"] == 1 and 4 < counts["measured"] <= margins.SHARED < counts["exhaustive"]


def test_a_plan_for_the_same_bits_is_another_one() -> None:
    def name() -> str:
        return planner.question(G4.program(), 128, H200, ANY_ORDER).key(measured=False)

    free = name()
    torch.use_deterministic_algorithms(True)
    try:
        assert name() != free
    finally:
        torch.use_deterministic_algorithms(False)


# -- models


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=not gated), nn.Linear(hidden, width, bias=not gated)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        h = self.up(y)
        h = nn.functional.gelu(h) if self.gate is None else nn.functional.silu(self.gate(y)) * h
        return x + self.down(h)


@pytest.mark.parametrize("gated", [False, True])
def test_a_model_with_few_rows_has_a_region_for_its_wide_block(gated: bool) -> None:
    model = Block(520, 640, gated).bfloat16().eval()
    with torch.no_grad():
        few = capture(model, (torch.randn(2, 9, 520).bfloat16(),)).graphs[0]
        many = capture(model, (torch.randn(2, 900, 520).bfloat16(),)).graphs[0]
    (region,) = partition(few).regions
    assert region.rows == 18 and len(region.inputs) == 1
    kinds = [op.kind for op in region.program.stages[0].ops]
    assert kinds.count("linear") == 2 + gated and "layer_norm" in kinds and kinds[-2:] == ["add", "store"]
    (tiled,) = partition(many).regions
    assert tiled.rows == 1800 and [op.kind for op in tiled.program.stages[0].ops] == kinds


def test_blocks_one_behind_the_other_are_a_region_each() -> None:
    """The residual of one is in front of the next one's norm: it belongs to the first."""
    model = nn.Sequential(Block(520, 640, True), Block(520, 640, False)).bfloat16().eval()
    with torch.no_grad():
        graph = capture(model, (torch.randn(9, 520).bfloat16(),)).graphs[0]
    found = partition(graph)
    assert [[op.kind for op in r.program.stages[0].ops].count("layer_norm") for r in found.regions] == [1, 1]
    assert found.exclusions == ()


def test_a_decoders_layer_gives_all_behind_its_attention() -> None:
    sizes = llama.Sizes(tokens=1, context=7, layers=1, width=528, heads=4, kv_heads=2, hidden=640, layers_only=True)
    x, turn, *others = llama.inputs(sizes)
    halves = [t.bfloat16() for t in others]
    with torch.no_grad():
        graph = capture(llama.module(sizes).bfloat16().eval(), (x.bfloat16(), turn, *halves)).graphs[0]
    kinds = [[op.kind for op in r.program.stages[0].ops] for r in partition(graph).regions]
    whole = "load load add rms_norm linear silu linear mul linear add store".split()
    assert [k for k in kinds if "silu" in k] == [whole]


def test_a_norm_whose_result_is_the_residual_too_stays_outside() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(520), nn.Linear(520, 640), nn.Linear(640, 520)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return x + self.down(nn.functional.gelu(self.up(x)))

    with torch.no_grad():
        graph = capture(Behind().bfloat16().eval(), (torch.randn(9, 520).bfloat16(),)).graphs[0]
    (region,) = partition(graph).regions
    assert [op.kind for op in region.program.stages[0].ops] == ["load", "linear", "gelu", "linear", "add", "store"]


def test_a_middle_that_others_use_stays_in_memory() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(520, 640), nn.Linear(640, 520)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = nn.functional.gelu(self.up(x))
            return self.down(h), h

    with torch.no_grad():
        graph = capture(Seen().bfloat16().eval(), (torch.randn(16, 520).bfloat16(),)).graphs[0]
    assert partition(graph).regions == ()


def test_torch_compile_runs_a_shared_tile(fresh: None) -> None:
    model = Block(520, 640, True).bfloat16().eval()
    x = torch.randn(2, 9, 520).bfloat16()
    with torch.no_grad():
        got = torch.compile(model, backend=tilestream, options={"target": "reference", "strategy": "shared"})(x)
        want = model.double()(x.double())
    assert (got.double() - want).norm() < 0.005 * want.norm()

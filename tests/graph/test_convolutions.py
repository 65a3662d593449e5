"""Convolutions: taps in the IR, the front end, the reference machine, and the kernels on the host."""

from __future__ import annotations

import importlib
import re
import shutil
from dataclasses import replace

import pytest
import sass
import torch
from bottlenecks import Bottleneck, images, small_resnet
from convolutions import TAILS, by_torch, chain, tensors
from places import DOCS
from torch import nn

from tilestream import cuda, reference
from tilestream.cuda.host.build import run_on_host
from tilestream.devices import get
from tilestream.errors import InputError, VerifyError
from tilestream.graph.capture import capture
from tilestream.graph.convolutions import is_convolution
from tilestream.graph.rewrites.operators import JOINED
from tilestream.graph.rewrites.pixels import from_pixels, to_pixels
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import rewrite
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline, Residency, Role, Shard, Tensor, TileOp
from tilestream.ir.plain import plain
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.ir.sizes import weight_bytes
from tilestream.ir.taps import Tap, Window
from tilestream.ir.text import show
from tilestream.ir.traffic import dram_of, l2_of
from tilestream.ir.verify import verify
from tilestream.kernels.fits import verify_on
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.emit import emit
from tilestream.kernels.stream.layout import lay_out
from tilestream.kernels.stream.stage_cost import stage_cost
from tilestream.kernels.stream.tables import TAPPED, TAPPED_IN_BULK
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.cost import product_bound_us
from tilestream.plan.find import kept_out
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.reference.whole import run_whole
from tilestream.report.facts import summary
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.spec import decode, encode, spec_of

SAME = Window(9, 7, (3, 3), padding=(1, 1))

# -- the IR


def test_text_and_json() -> None:
    p = chain(SAME, 16, 32, 24, residual=True)
    verify(p)
    assert "load0: 16 bf16 = load(x, height=9, width=7, stride_y=1, stride_x=1, y=-1, x=-1)" in show(p)
    written = show(plain(p))
    assert summary(p.stages[0], p).startswith("tap 16 (x9), cat, linear 144>32")
    assert "load5[rows,load5.c]:bf16 = load x[(rows/63),(rows/7%9),(rows%7)+1,load5.c]" in written
    for form in (p, plain(p)):
        assert pipeline_from_json(pipeline_to_json(form)) == form


WINDOWS = {
    "same": SAME,
    "strided": Window(9, 7, (3, 3), (2, 1), (1, 1)),
    "dilated": Window(11, 9, (3, 2), (1, 2), (2, 0), (2, 3)),
    "wide": Window(12, 5, (7, 1), (4, 1), (3, 0)),
    "one pixel": Window(8, 8, (1, 1), (2, 2)),
    "valid": Window(6, 6, (5, 5)),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", WINDOWS)
def test_on_the_reference_machine(name: str, count: int) -> None:
    """Both forms, and whole tensors, against torch."""
    window = WINDOWS[name]
    p = chain(window, 8, 16, 24, residual=True)
    given = tensors(p, window, count)
    want = by_torch(p, window, given)
    (got,) = reference.run(p, given, precision="float64").values()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*run_meshes(plain(p), given, FLOAT64).values(), want)
    torch.testing.assert_close(*run_whole(p, given).values(), want.bfloat16(), rtol=0.02, atol=0.05)


def _with(p: Pipeline, *changed: Tensor, **tap: int) -> Pipeline:
    """The pipeline with other tensors, and its second tap with other attributes."""
    named = {t.name: t for t in changed}
    stage = p.stages[0]
    second = stage.ops[1]
    other = replace(second, attrs=tuple({**dict(second.attrs), **tap}.items()))
    p = p.with_stages((replace(stage, ops=(stage.ops[0], other, *stage.ops[2:])),))
    return replace(p, tensors=tuple(named.get(t.name, t) for t in p.tensors))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda p: _with(p, Tensor.pictures("x", 9, 7, 17, "bf16")), r"17 x 2 = 34 bytes, no multiple of 16"),
        (lambda p: _with(p, Tensor.pictures("x", 9, 7, 24, "bf16")), r"tile 'load0' has 16 features, but pictures 'x'"),
        (lambda p: _with(p, Tensor.of("x", Role.PARAMETER, (9, 16), "bf16")), r"pictures 'x' have 2 dimensions"),
        (lambda p: _with(p, Tensor.of("x", Role.INPUT, (16,), "bf16")), r"uses input 'x' where only a parameter"),
        (
            lambda p: _with(p, y=9),
            r"rows 9 to 9 \+ 1 x \(9 - 1\) = 17 of pictures 'x', which have 9: nothing but zeros",
        ),
        (lambda p: _with(p, x=-7), r"columns -7 to -7 \+ 1 x \(7 - 1\) = -1 of pictures 'x', which have 7"),
        (lambda p: _with(p, stride_x=0), r"at strides of 1 x 0"),
        (lambda p: _with(p, width=6), r"makes rows of 9 x 6 pixels, but load at model.py:0 of 9 x 7"),
    ],
)
def test_what_is_refused(broken, says: str) -> None:
    with pytest.raises(VerifyError, match=says):
        verify(broken(chain(SAME, 16, 32, 24)))


def test_a_window_that_does_not_fit() -> None:
    with pytest.raises(VerifyError, match=r"2 x \(5 - 1\) \+ 1 = 9 pixels does not fit 6 \+ 2 x 1 = 8"):
        _ = Window(12, 6, (3, 5), padding=(1, 1), dilation=(1, 2)).out


def test_rows_and_pictures_agree() -> None:
    p = chain(SAME, 16, 32, 24, residual=True)
    given = tensors(p, SAME, 2)
    with pytest.raises(InputError, match=r"pictures 'x' make 2 x 63 = 126 rows, but 'r' has 125"):
        reference.run(p, given | {"r": given["r"][1:]})


def test_pictures_are_read_from_dram_once() -> None:
    p = chain(SAME, 16, 32, 24)
    read, _ = dram_of(p, 5 * 63)
    assert read["x"] == 5 * 9 * 7 * 16 * 2


def test_taps_come_again_through_the_ports() -> None:
    """All but the first time, as weights do that every step takes again."""
    rows = 5 * 63
    p, plain_rows = chain(SAME, 16, 32, 24), chain(Window(9, 7, (1, 1)), 16, 32, 24)
    again, weights = l2_of(p, rows)
    assert again == l2_of(plain_rows, rows)[0] == 0
    steps = -(-rows // 64 // p.stages[0].tiles_per_step)
    once = weight_bytes(p.stages[0], p)
    assert weights - (steps - 1) * once == rows * 9 * 16 * 2 - 5 * 9 * 7 * 16 * 2


def test_what_no_product_can_beat_reads_a_picture_once() -> None:
    device, rows = get("h200"), 32 * 63
    p = chain(SAME, 64, 64, 0)
    moved = 2 * rows * (64 + 64)
    want = max(2.0 * rows * 64 * 576 / device.tensor_flops["bf16"], moved / device.l2_bytes_per_s) * 1e6
    assert product_bound_us(p, rows, device) == pytest.approx(want)


def test_lanes_have_their_time_and_bulk_copies_none() -> None:
    by_lanes, bulk = (chain(SAME, 128, 64, 64, bulk=b) for b in (False, True))
    told = [op[0] for op in emit(by_lanes).tables.load_ops]
    taken = {
        p: [s.streams[tile].tap for s in (build(p.stages[0], p),) for tile, _ in s.chunks()] for p in (by_lanes, bulk)
    }
    assert told.count(TAPPED) == sum(tap is not None and not tap.bulk for tap in taken[by_lanes]) == 9 * 2
    assert [op[0] for op in emit(bulk).tables.load_ops].count(TAPPED_IN_BULK) == 9 * 2
    assert all(tap is None or tap.bulk for tap in taken[bulk])
    slow, fast = (stage_cost(p.stages[0], p, get("h200")).step_s for p in (by_lanes, bulk))
    assert slow > fast


def test_corners_of_a_box() -> None:
    """As torch's own arithmetic has them: from -padding to padding - (kernel - 1) dilation, where strides divide."""
    window = Window(14, 10, (3, 3), (1, 1), (2, 1), (2, 1))
    (spec,) = emit(chain(window, 64, 64, 0, bulk=True)).tables.windows
    assert spec.corners == ((-1, -2), (1 - 2, 2 - 4))
    (strided,) = emit(chain(Window(9, 8, (3, 3), (2, 2), (1, 1)), 64, 64, 0, bulk=True)).tables.windows
    assert strided.corners == ((-1, -1), (-1 + 2 * 3 - 7, -1 + 2 * 4 - 8))


@pytest.mark.parametrize(
    ("window", "bulk", "says"),
    [
        (Window(64, 64, (2, 2), (16, 16)), True, r"strides of 16 x 16 are more than 8"),
        (
            Window(300, 8, (2, 1), padding=(128, 0), dilation=(256, 1)),
            True,
            r"a tap lies 256 > 255 pixels behind the first",
        ),
        (Window(300, 8, (3, 1), padding=(129, 0), dilation=(64, 1)), True, r"\(0, -129\) before and \(0, 1\) behind"),
        (Window(70000, 8, (1, 2)), False, r"pixels up to 69999 > 65535 from a corner"),
    ],
)
def test_what_kernels_cannot_address(window: Window, bulk: bool, says: str) -> None:
    p = chain(window, 8, 16, 0, bulk=bulk)
    verify(p)
    with pytest.raises(VerifyError, match=says):
        build(p.stages[0], p)


# -- kernels


needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_gcc
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_kernels_on_the_host(dtype: str) -> None:
    """In bulk and by columns, or rounded to tf32 by lanes; ``test_protocol`` has both ways by rows."""
    window, bulk = WINDOWS["dilated"], dtype == "bf16"
    p = chain(window, 64, 64, 40, dtype=dtype, bulk=bulk)
    if bulk:
        p = p.with_stages((p.stages[0].with_(placement=Shard(1), residency=Residency.RESIDENT),))
    verify(p)
    given = tensors(p, window, 4)
    (got,), (working,) = run_on_host(p, given).values(), reference.run(p, given).values()
    exact = by_torch(p, window, given)
    error, own = (float((x.double() - exact).norm() / exact.norm()) for x in (got, working))
    assert error <= 2 * own + (2**-8 if dtype == "f32" else 1e-4)


@needs_gcc
def test_lanes_and_bulk_copies_round_alike() -> None:
    """To tf32, ties to even: 1 + 2^-11 is as far from 1 as from 1 + 2^-10, and 1 + 3 2^-11 from two as well."""
    window = Window(5, 5, (2, 2))
    got = []
    for bulk in (False, True):
        p = chain(window, 32, 16, 0, dtype="f32", bulk=bulk)
        given = tensors(p, window, 4)
        given["x"] = torch.where(given["x"] > 0, 1 + 2.0**-11, -1 - 3 * 2.0**-11)
        got.append(run_on_host(p, given)[p.by_role(Role.OUTPUT)[0].name])
    assert torch.equal(*got)
    rounded = torch.where(given["x"] > 0, 1.0, -1 - 2.0**-9)
    torch.testing.assert_close(got[0], run_on_host(p, given | {"x": rounded})[p.by_role(Role.OUTPUT)[0].name])


@needs_gcc
def test_weights_that_stay_lie_in_pages_as_low_as_the_taps_layer_is_narrow() -> None:
    window = Window(9, 7, (3, 3), padding=(1, 1))
    p = chain(window, 64, 64, 200, residual=True, bulk=True)
    p = p.with_stages((p.stages[0].with_(residency=Residency.RESIDENT),))
    verify_on(p, get("h200"))
    assert lay_out(build(p.stages[0], p)).page_rows == 64
    given = tensors(p, window, 3)
    (got,), (working,) = run_on_host(p, given).values(), reference.run(p, given).values()
    exact = by_torch(p, window, given)
    error, own = (float((x.double() - exact).norm() / exact.norm()) for x in (got, working))
    assert error <= 2 * own + 1e-4


def test_a_kernel_that_does_not_fit_is_refused_before_it_is_compiled() -> None:
    p = chain(Window(9, 7, (3, 3), padding=(1, 1)), 64, 64, 64, dtype="f32", bulk=True)
    p = p.with_stages((p.stages[0].with_(placement=Shard(1), residency=Residency.RESIDENT),))
    with pytest.raises(VerifyError, match=r"weights 327680 \+ input ring \d+ .* > 232448 bytes of shared memory"):
        cuda.sources(p)


@needs_gcc
def test_a_slice_of_channels_is_not_copied_in_bulk() -> None:
    """Bulk copies bring whole chunks, and what follows the slice would meet padded weights."""
    window = Window(5, 5, (1, 1), (2, 2))
    p = chain(window, 72, 16, 0, bulk=True)
    stage = p.stages[0]
    load, linear, *rest = stage.ops
    part = TileOp("slice", replace(load.out, name="part", axes=(load.out.axes[0], replace(load.out.axes[1], size=24))),
                  (load.out.name,), attrs=(("start", 16), ("stop", 40)))  # fmt: skip
    weight = Tensor.of("w1", Role.PARAMETER, (16, 24), "bf16")
    p = replace(
        p.with_stages((replace(stage, ops=(load, part, replace(linear, tiles=("part",)), *rest)),)),
        tensors=tuple(weight if t.name == "w1" else t for t in p.tensors),
    )
    verify(p)
    assert [op[0] for op in emit(p).tables.load_ops] == [TAPPED]
    given = tensors(p, window, 3)
    (got,), (want,) = run_on_host(p, given).values(), reference.run(p, given).values()
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_kernels_without_taps_say_nothing_of_them() -> None:
    assert "TAPS" in emit(chain(SAME, 64, 64, 0)).text
    one = chain(SAME, 64, 64, 64)
    row = one.stages[0].ops[-3:]  # the last linear alone
    assert all(Tap.of(op) is None for op in row)


@pytest.mark.nvrtc
@pytest.mark.parametrize("bulk", [False, True], ids=["lanes", "bulk"])
def test_compiles_without_spills_and_passes_the_lint(bulk: bool) -> None:
    """The tail of ResNet's first bottlenecks."""
    p = TAILS["convolutions_bulk" if bulk else "convolutions"]()
    (report,) = cuda.compile_only(p)
    assert report.spills == 0
    if sass.disassembler() is not None:
        assert sass.lint(report.cubin, emit(p)) == []


# -- the front end


def test_a_bottleneck_is_two_regions_and_its_norms_are_folded() -> None:
    """A 3 x 3 reads its neighbours' results: it begins a region, which the next block's 1 x 1 belongs to."""
    (graph,) = capture(small_resnet(), (images(),)).graphs
    rewrite(graph, to_pixels, Settings(bulk=False))
    apart = kept_out(graph.graph)
    found = partition(graph, apart=apart)
    (vectors,) = [n.args[0] for n in graph.graph.nodes if n.target is JOINED]  # Triton compiles a cat of all for long
    assert len(vectors) == 7 * 4 and not any(n.target is torch.ops.aten.cat.default for n in graph.graph.nodes)
    assert [
        sum(name in ("convolution", "aten.linear.default") for name in r.operators) for r in found.regions[:-1]
    ] == [1, 3, 3]
    assert {e.reason for e in found.exclusions} == {next(iter(apart.values())), "works along rows"}
    second = found.regions[1].program
    assert sum(op.kind == "linear" for op in second.stages[0].ops) == 3
    assert sum(op.kind == "mul" for op in second.stages[0].ops) == 3  # a scale for each norm, and nothing else
    assert decode(encode(spec_of(found.regions[1], second, "reference"))).pipeline == pipeline_from_json(
        pipeline_to_json(second, sources=False)
    )


def test_through_torch_compile() -> None:
    model, x = small_resnet(), images()
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(
            model, backend=tilestream, options={"target": "reference", "convolutions": "lanes", "cache": False}
        )(x)
        own = model(x)
        exact = small_resnet().double()(x.double())
    error, eager = (float((y.double() - exact).norm() / exact.norm()) for y in (got, own))
    assert error <= 2 * eager


def test_networks_are_taken_unless_asked_otherwise() -> None:
    with torch.no_grad():
        norms, without = analyse(small_resnet(), (images(),)), analyse(Odd(16, 16, 3).eval(), (images(16),))
        off = analyse(small_resnet(), (images(),), Options(convolutions="off"))
    assert any("option convolutions='bulk' takes this one" in e.reason for e in off.exclusions)
    assert not any("a convolution mixes rows" in e.reason for e in (*norms.exclusions, *without.exclusions))


def test_a_plan_for_many_pictures_is_none_for_few() -> None:
    """One for few serves those of a batch that has not grown much, as plans of rows do."""
    torch._dynamo.reset()
    compiled = torch.compile(
        Odd(8, 8, 3, padding=1).eval(),
        backend=tilestream,
        dynamic=False,
        options={"target": "reference", "cache": False},
    )
    before = len(prepare.analyses())
    with torch.no_grad():
        for count in (12, 4, 1):
            compiled(images(8, 4, count))
    assert [a.plan.rows for a in prepare.analyses()[before:] if a.plan] == [12 * 16, 12 * 16, 16]


def test_undone_where_no_region_takes_it() -> None:
    (graph,) = capture(small_resnet(), (images(),)).graphs
    want = graph(*[n.meta["val"].new_ones(n.meta["val"].shape) for n in graph.graph.find_nodes(op="placeholder")])
    rewrite(graph, to_pixels, Settings(bulk=False))
    assert any(is_convolution(n) for n in graph.graph.nodes)
    rewrite(graph, from_pixels)
    assert not any(is_convolution(n) for n in graph.graph.nodes)
    got = graph(*[n.meta["val"].new_ones(n.meta["val"].shape) for n in graph.graph.find_nodes(op="placeholder")])
    assert [g.shape for g in got] == [w.shape for w in want]


class Odd(nn.Module):
    """One convolution, and an activation."""

    def __init__(self, *args: int, **words: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*args, **words).bfloat16().to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


@pytest.mark.parametrize(
    ("model", "x", "says"),
    [
        (Odd(16, 16, 3), torch.randn(2, 16, 8, 8).bfloat16(), r"channels do not lie last"),
        (Odd(16, 16, 3, groups=2), images(16), r"one of groups"),
        (Odd(12, 16, 7), images(12), r"12 channels: pixels of other than a multiple of 16 bytes"),
        (Odd(16, 16, 3, padding=1), images(16, 1), r"a tap reads nothing but padding"),
        (Odd(16, 16, 9), images(16, 10), r"81 taps, more than 64"),
        (Odd(16, 16, 3), images(16), r"option convolutions='bulk' takes this one"),
    ],
    ids=["contiguous", "groups", "twelve channels", "padding", "taps", "off"],
)
@pytest.mark.every(3)
def test_why_a_convolution_is_left(model: nn.Module, x: torch.Tensor, says: str) -> None:
    on = Options(convolutions="off") if "option" in says else Options()
    with torch.no_grad():
        found = analyse(model.eval(), (x,), on)
    assert any(re.search(says, e.reason) for e in found.exclusions)


def test_a_symbolic_batch() -> None:
    """One region for every batch; the picture's size is part of it."""
    model = Bottleneck(16, 16).bfloat16().to(memory_format=torch.channels_last).eval()
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend=tilestream, dynamic=True,
        options={"target": "reference", "convolutions": "lanes", "cache": False},
    )  # fmt: skip
    with torch.no_grad():
        for count in (2, 3):
            x = images(16, count=count)
            torch._dynamo.mark_static(x, 2)
            torch._dynamo.mark_static(x, 3)
            got, want = compiled(x), model(x)
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
            assert got.stride() == want.stride()  # channels last, as eager


def test_the_pages_have_what_was_measured() -> None:
    script = importlib.import_module("benchmarks.tables.conv_tables")
    for page, parts in script.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert script.filled(text, parts) == text, "run benchmarks/tables/conv_tables.py"


def test_the_example_of_the_page_runs() -> None:
    page = (DOCS / "convolutions.md").read_text()
    for example in page.split("```python")[1:]:
        exec(compile(example.split("```")[0], "docs/convolutions.md", "exec"), {})

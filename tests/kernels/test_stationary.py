"""Stationary sums: what becomes one, values of their kernels on the host, their machine code."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import sass
import torch
from compiled import compile_source
from host_runs import CAUGHT
from stationary import Layer, data, exact, gradients

from tilestream import cuda, reference
from tilestream.cuda.host.build import HostRun, Mutation, run_on_host
from tilestream.devices import get
from tilestream.errors import PlanError, QueueTimeout, VerifyError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.plain import plain
from tilestream.ir.verify import verify
from tilestream.kernels.families import why_no_kernel
from tilestream.kernels.fits import verify_on
from tilestream.kernels.gradients import builds, is_chain, is_gradients
from tilestream.kernels.gradients.cost import cost
from tilestream.kernels.gradients.emit import emit
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.plan.gradients import Gradient, weight_gradients

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_disassembler = pytest.mark.skipif(
    sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
)
ROUNDING = {"bf16": 2**-9, "f16": 2**-12, "f32": 2**-20}
"""Of a result that is rounded once, relative to the norm; fp32: what adding up in another order makes of it."""


MANY = Layer(64, 256, splits=23)
"""Partial sums of more CTAs than a thread adds, and more of them than a CTA adds at once."""


def run(p: Pipeline, inputs: dict[str, torch.Tensor], folder: Path, **options) -> dict[str, torch.Tensor]:
    return run_on_host(p, inputs, HostRun(folder=folder, **options))


def check(p: Pipeline, rows: int, folder: Path, **options) -> dict[str, torch.Tensor]:
    """The kernel's gradients are float64's, rounded once."""
    inputs = data(p, rows)
    got, want = run(p, inputs, folder, **options), exact(p, inputs)
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = float((got[name].double() - value).norm() / value.norm().clamp_min(1e-30))
        assert error <= ROUNDING[p.tensor(name).dtype], f"{name}: error {error:.2e}"
    return got


# -- values


@on_host
@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_two_blocks_over_three_splits(rows: int, folder: Path) -> None:
    """Ragged out, k and rows; at one row two of the three splits have none."""
    check(gradients(Layer(136, 200, (2, 1), 3, "o")), rows, folder)


@on_host
@pytest.mark.parametrize(
    "layer",
    [
        Layer(64, 64),
        Layer(40, 24, splits=2, bias=False, weight="f32"),
        Layer(128, 264, (1, 2), 2, "o", dtype="f16", weight="f16", bias_dtype="f16"),
        Layer(48, 328, (1, 1), 2, "k", weight="f32", bias_dtype="bf16"),
        Layer(200, 136, (4, 2), 1, "k"),
        MANY,
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_any_widths_and_meshes(layer: Layer, folder: Path) -> None:
    check(gradients(layer), 150, folder)


@on_host
@pytest.mark.parametrize(
    "layer", [Layer(1, 63, splits=2), Layer(3, 64, splits=2), Layer(72, 27, (1, 1), 2, "o")], ids=str
)
def test_rows_that_bulk_copies_cannot_address(layer: Layer, folder: Path) -> None:
    check(gradients(layer), 131, folder)


@on_host
def test_the_layers_of_an_mlp_in_one_launch(folder: Path) -> None:
    layers = (Layer(72, 40, splits=2, groups="o"), Layer(72, 72, splits=2, groups="o"), Layer(3, 72, splits=1))
    p = gradients(*layers)
    assert len({s.layout.held[0].blocks for s in builds(p)}) == 2  # two kinds of code in one kernel
    check(p, 200, folder)


@on_host
def test_the_same_input_gives_the_same_bits_and_workspaces_are_used_again(folder: Path) -> None:
    p = gradients(Layer(136, 72, (2, 1), 3, "o"))
    inputs = data(p, 500)
    first = run(p, inputs, folder)
    for other in (run(p, inputs, folder, seed=1), run(p, inputs, folder, launches=3)):
        assert all(torch.equal(first[name], other[name]) for name in first)


@on_host
def test_it_means_what_the_reference_machine_computes(folder: Path) -> None:
    p = gradients(Layer(136, 72, (2, 1), 3, "o"))
    inputs = data(p, 150)
    got, meant = run(p, inputs, folder), reference.run(p, inputs)
    for name in got:
        torch.testing.assert_close(got[name].double(), meant[name].double(), rtol=2**-7, atol=1e-3)


@on_host
def test_not_a_number_stays_where_it_is(folder: Path) -> None:
    """An infinity in one column of dY spoils one row of dW and one bias; what lies outside of matrices nothing."""
    p = gradients(Layer(40, 24, splits=2))
    inputs = data(p, 70)
    inputs["DY0"][3, 5] = float("inf")
    got = run(p, inputs, folder)
    spoilt = [i for i in range(40) if not torch.isfinite(got["DW0"][i]).all()]
    assert spoilt == [5] and [i for i in range(40) if not torch.isfinite(got["DB0"][i])] == [5]


# -- protocol


@on_host
def test_waits_are_bounded_and_say_for_whom(folder: Path) -> None:
    p = gradients(Layer(40, 24, splits=2))
    lost = Mutation(
        "gradients.cuh",
        "if (warp == 0 && lane_in_warp() == 0) flag_release(mine, launch);",
        "if (warp == 0 && cta != 1) flag_release(mine, launch);",
    )
    with pytest.raises(
        QueueTimeout, match="CTA [01] .* partial sums of CTA 1, one of 2 that share out the rows: expected launch 1"
    ):
        run(p, data(p, 100), folder, mutations=(lost,), flag_limit_s=1.0)


MUTANTS = {
    "a slot is filled while it is in use": ("gradients.cuh", "      ring.wait_empty();\n", ""),
    "a slot is freed before its products are done": ("kernel", "mma_wait<1>();  // the products", "// the products"),
    "partial sums are announced before both warpgroups have left theirs": (
        "gradients.cuh",
        "  named_sync(LEFT, MEMBERS);\n  if (warp == 0 && lane_in_warp() == 0) flag_release(mine, launch);",
        "  if (warp == 0 && lane_in_warp() == 0) flag_release(mine, launch);\n  named_sync(LEFT, MEMBERS);",
    ),
    "partial sums are announced without a release": (
        "gradients.cuh",
        "flag_release(mine, launch)",
        "flag_relaxed(mine, launch)",
    ),
    "partial sums are added before they have come": (
        "gradients.cuh",
        "flag_wait(sync, peer, launch, cta, peer, 0);",
        ";",
    ),
    "sums are added before this CTA knows of the others'": (
        "gradients.cuh",
        "  named_sync(MET, MEMBERS);     // and so have all others, of all CTAs of the block\n",
        "",
    ),
}


@on_host
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str, folder: Path) -> None:
    """Each step of the protocol is there for a reason: without it a value is wrong, or what ``CAUGHT`` names shows."""
    p = gradients(Layer(72, 64, splits=2, groups="o"))
    inputs = data(p, 64 * 30)
    with pytest.raises((*CAUGHT, AssertionError)):
        changed = run(p, inputs, folder, mutations=(Mutation(*MUTANTS[name]),), sanitize=True, flag_limit_s=10)
        got, want = changed, exact(p, inputs)
        assert all((got[n].double() - want[n]).norm() <= 2**-8 * want[n].norm() for n in want)


@on_host
def test_no_races(folder: Path) -> None:
    check(gradients(Layer(136, 72, (2, 1), 2, "o")), 64 * 12, folder, sanitize=True, launches=2)


# -- what is one, and what is not


def test_a_gradient_divided_over_the_grid_is_a_stationary_sum() -> None:
    p = gradients(Layer(256, 256, (2, 1), 66, "o"))
    verify_on(p, get("h200"))
    assert is_gradients(p) and not is_chain(p) and why_no_kernel(p) == ""
    assert kernel_shape(plain(p).stages[0]) is KernelShape.STATIONARY_SUM
    (s,) = builds(p)
    assert (s.ctas, s.block, s.slots, s.layout.slot_bytes) == (132, (128, 256), 4, 48 * 1024)
    assert s.partial_bytes == 128 * 256 * 4 + 128 * 4 and s.shared_bytes <= 232448


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Layer(256, 256, (1, 1), 4, "o"), r"o0 256 over 1 CTAs x 2 warpgroups is 2 x 64 columns a warpgroup > 64"),
        (Layer(128, 600, (1, 2), 4, "o"), r"k0 600 over 2 CTAs x 1 warpgroups is 5 x 64 columns a warpgroup > 256"),
        (Layer(128, 320, (1, 4), 1, "o"), r"k0 320 is 5 chunks of 64; 4 CTAs of 2 leave one without any"),
        (Layer(128, 64, dtype="f32"), r"'layer0' reads X0 f32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told_the_numbers(layer: Layer, why: str) -> None:
    p = gradients(layer)
    verify(p)
    with pytest.raises(VerifyError, match=why):
        builds(p)
    assert why_no_kernel(p)


def test_more_ctas_than_the_device_has_are_refused() -> None:
    with pytest.raises(VerifyError, match="134 > 132 SMs"):
        verify_on(gradients(Layer(128, 64, splits=67, groups="o"), Layer(128, 64, splits=67, groups="o")), get("h200"))


def test_other_shapes_are_refused_with_the_reason() -> None:
    p = gradients(Layer(128, 64, splits=2))
    (stage,) = p.stages
    by_128 = p.with_stages((replace(stage, loops=(Loop("rows", 128),)),))
    with pytest.raises(VerifyError, match="takes 128 rows a step, kernels 64"):
        cuda.sources(by_128)
    cluster = p.with_stages((replace(stage, mesh=(Spread(Level.CLUSTER, 2, ("rows",)),)),))
    with pytest.raises(VerifyError, match="divided over a cluster"):
        builds(cluster)


# -- machine code


CODE = {
    "256x256": gradients(Layer(256, 256, (2, 1), 66, "o")),
    "wide": gradients(Layer(512, 512, (4, 2), 16, "o")),
    "k over warpgroups": gradients(Layer(64, 512, (1, 1), 132, "k", weight="f32")),
    "an MLP": gradients(Layer(256, 63, (2, 1), 20, "o"), Layer(256, 256, (2, 1), 40, "o"), Layer(3, 256, splits=10)),
}


@pytest.mark.nvrtc
@needs_disassembler
@pytest.mark.parametrize("name", CODE)
@pytest.mark.every(2)
def test_machine_code(name: str) -> None:
    source = emit(CODE[name])
    report = compile_source(source)
    assert report.spills == 0 and report.stack == 0, report.log
    code = sass.disassemble(report.cubin)
    assert {i.name for i in code.instructions}.isdisjoint({"LDL", "STL", "LD", "ST"})
    for loop in product_loops(code):
        slow = [str(i) for i in loop if i.name in ("MEMBAR", "CCTL", "ERRBAR", "LDG", "STG", "BAR")]
        assert slow == []
        waits = [i for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR")]
        assert len(waits) == 1 and waits[0].operands.endswith("0x1")  # one group of products stays under way


def product_loops(code: sass.Code) -> list[list[sass.Instruction]]:
    """Each loop around products: from the wait for a slot to the branch back."""
    products = code.having("HGMMA")
    loops, at = [], code.instructions
    for i, first in enumerate(at):
        if not first.opcode.startswith("WARPGROUP.ARRIVE"):
            continue
        end = next(
            k
            for k in range(i, len(at))
            if at[k].opcode.startswith("WARPGROUP.DEPBAR") and at[k].operands.endswith("0x0")
        )
        loops.append([*at[i:end]])
    assert loops and sum(i in products for loop in loops for i in loop) == len(products)
    return loops


# -- the plan


def mlp(*widths: int) -> list[Gradient]:
    """Layers of a perceptron, with biases."""
    return [
        Gradient(f"DY{n}", f"X{n}", f"DW{n}", out, k, f"DB{n}", bias_dtype="f32")
        for n, (k, out) in enumerate(pairwise(widths))
    ]


def test_sms_are_dealt_out_by_what_layers_read() -> None:
    h200 = get("h200")
    p = weight_gradients("mlp", mlp(64, 256, 256, 256, 3), h200)
    verify_on(p, h200)
    schedules = builds(p)
    assert sum(s.ctas for s in schedules) in (131, 132)  # what is left is less than the next layer's blocks
    loads = [s.layout.slot_bytes / s.splits for s in schedules]
    assert max(loads) <= 1.35 * min(loads)


@on_host
def test_a_planned_mlp_computes_its_gradients(folder: Path) -> None:
    p = weight_gradients("mlp", mlp(24, 72, 40, 3), replace(get("h200"), sms=7))
    assert sum(s.ctas for s in builds(p)) == 7
    check(p, 200, folder)


def test_layers_that_are_too_many_for_the_machine_are_told_the_sum() -> None:
    with pytest.raises(PlanError, match=r"512 \+ 8 = 520 blocks of 128 x 256 > 132 SMs"):
        weight_gradients("wide", mlp(4096, 4096, 64), get("h200"))


def test_the_prediction_is_that_of_the_prototype_measured() -> None:
    """Eight layers of 256 x 256 over 262,144 rows took 531 us on an H200; the floor is what they read from DRAM."""
    h200 = get("h200")
    predicted = cost(weight_gradients("mlp", mlp(*[256] * 9), h200), 262_144, h200)
    assert max(predicted["tensor"].seconds, predicted["dram"].seconds) == pytest.approx(16 * 262_144 * 512 / 4.3e12)
    assert predicted.seconds == pytest.approx(531e-6, rel=0.05)

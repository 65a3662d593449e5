"""Launches of one row: the kernel on the host, a fiber a lane, and compiled; what is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from host_runs import check, is_caught
from one_rows import cell, columns_of_one, layer
from programs import Program, chain
from random_pipelines import tensors_for

from tilestream import cuda
from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import kernel_of
from tilestream.kernels.fits import verify_on
from tilestream.kernels.one_row.kernel import OneRowKernel
from tilestream.kernels.one_row.model import find, is_one_row
from tilestream.kernels.parts.headers import headers
from tilestream.options import Options
from tilestream.plan.few_rows import ONE_ROW
from tilestream.plan.passes.divide_columns import divide_columns
from tilestream.plan.planner import proposals

gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
H200 = get("h200")
FEW = H200.with_sms(3)
"""So few CTAs that warps have several columns at once, and several jobs."""
CASES = {
    "a cell": (cell(), FEW),
    "a cell of f16": (cell(dtype="f16"), FEW),
    "a column a CTA": (cell(), H200),
    "more pieces than a lane loads at once": (layer(3336, 5), FEW),
    "jobs by turns": (layer(40, 700), FEW),
    "columns of one": (columns_of_one(), FEW),
}


def divided(name: str) -> Pipeline:
    program, device = CASES[name]
    made = divide_columns(program, device)
    verify_on(made, device)
    return made


@gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_values(name: str, folder: Path) -> None:
    check(divided(name), 1, folder)


@gxx
def test_several_rows_are_as_many_launches(folder: Path) -> None:
    made = divided("a cell")
    assert [(part.first, part.rows) for part in kernel_of(made).parts(3)] == [(0, 1), (1, 1), (2, 1)]
    check(made, 3, folder)


@gxx
def test_lanes_do_not_race(folder: Path) -> None:
    check(divided("a cell"), 1, folder, sanitize=True)


@gxx
def test_any_order_of_lanes_gives_the_same_bits(folder: Path) -> None:
    made = divided("a cell")
    tensors = tensors_for(made, 1)
    first, *others = (run_on_host(made, tensors, HostRun(seed=seed, folder=folder)) for seed in range(3))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


MUTANTS = {
    "rows are read before all are there": ("    lanes::all_together();\n  }\n  float sums", "  }\n  float sums", True),
    "sums of a row are read before all are there": ("  lanes::all_together();\n  v = float", "  v = float", True),
    "one warp's sum of a row": ("w < WARPS; ++w", "w < 1; ++w", False),
    "half of a sum": ("far > 0; far /= 2) sum +=", "far > 1; far /= 2) sum +=", False),
    "the first pieces alone": ("step < STEPS", "step < 1", False),
    "the first pieces again": ("pieces.load(p, c, step * G::PIECES)", "pieces.load(p, c, 0)", False),
    "every product of one row": ("K::DEPTH * G::operand(j)", "K::DEPTH * 0", False),
    "the first job alone": ("job < K::JOBS", "job < 0", False),
    "the first CTA's columns": ("lanes::block() * G::OWN + own", "own", False),
    "no values beside": ("if (has) G::load(p, mine, x);", "", False),
}  # fmt: skip


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(6)
def test_mutants_are_caught(name: str, folder: Path) -> None:
    old, new, races = MUTANTS[name]

    def is_right(options: HostRun, case: str) -> bool:
        try:
            check(divided(case), 1, folder, sanitize=options.sanitize, mutations=options.mutations)
        except AssertionError:
            return False
        return True

    cases = ["a cell"] if races else ["a cell", "more pieces than a lane loads at once", "jobs by turns"]
    assert any(is_caught(lambda o, c=case: is_right(o, c), "one_row.cuh", old, new, races) for case in cases)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_compiles_without_spills(name: str) -> None:
    (source,) = cuda.sources(divided(name))
    made = compile_text(source.text, source.name, source.shared_bytes)
    assert made.spills == 0 and made.stack == 0


def test_weights_are_asked_for_before_the_kernel_in_front_has_ended() -> None:
    """Rows, which that may write, and what they are multiplied with, behind."""
    header = headers()["one_row.cuh"]
    assert (
        header.index("pieces.load(p, c, 0)") < header.index("await_kernel_before") < header.index("G::load(p, mine, x)")
    )
    assert kernel_of(divided("a cell")).starts_early


def test_groups_and_rows() -> None:
    found = find(cell())
    assert [(len(g.products), g.columns) for g in found.groups] == [(3, 40), (1, 72)]
    assert len(found.operands) == 2 and len(found.stores) == 1 and len(found.kept) == 2
    assert isinstance(kernel_of(divided("a cell")), OneRowKernel)


def odd(width: int, kind: str) -> Pipeline:
    p = Program(kind)
    x = p.load("x", width)
    if kind == "cat":
        x = p.cat(x, p.load("beside", width))
    if kind == "softmax behind":
        x = p.op("softmax", 64, p.linear(x, 64))
    p.store(x if kind == "no product" or kind == "softmax behind" else p.linear(x, 64))
    return p.build()


@pytest.mark.parametrize("width, kind", [(68, "odd"), (64, "cat"), (64, "softmax behind"), (64, "no product")])
def test_what_is_no_launch_of_one_row(width: int, kind: str) -> None:
    assert not is_one_row(odd(width, kind))
    with pytest.raises(VerifyError, match="no launch of one row"):
        divide_columns(odd(width, kind), H200)


def test_two_layers_and_products_of_two_widths_are_none() -> None:
    assert not is_one_row(chain(2, 64))
    p = Program("two")
    p.store(p.op("add", 64, p.linear(p.load("x", 64), 64), p.linear(p.load("h", 128), 64)))
    assert not is_one_row(p.build())


@pytest.mark.parametrize("rows, found", [(1, 1), (2, 0)])
def test_it_is_a_candidate_of_one_row(rows: int, found: int) -> None:
    made = [c for c in proposals(layer(768, 768), rows, H200, Options()) if c.detail == ONE_ROW]
    assert len(made) == found
    assert all(c.predicted_us is not None and H200.launch_s * 1e6 < c.predicted_us < 6 for c in made)


def test_more_weights_take_longer() -> None:
    times = [kernel_of(divide_columns(layer(768, n), H200)).cost(1, H200).us for n in (768, 7680, 76_800)]
    assert times == sorted(times) and times[2] > 1e6 * 2 * 768 * 76_800 / H200.dram_bytes_per_s

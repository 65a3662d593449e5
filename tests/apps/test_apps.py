"""Models of the papers have their published sizes, and loading tells what is wrong with a target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tilestream import cuda, devices
from tilestream.apps import APPS
from tilestream.apps.load import load
from tilestream.apps.nerf import NeRF, PositionalEncoding, rays, scene
from tilestream.errors import CaptureError, OptionError
from tilestream.options import Options
from tilestream.plan import planner
from tilestream.plan.analyse import analyse


def weights(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for n, p in module.named_parameters() if n.endswith("weight") and p.dim() == 2]


def test_nerf_has_the_sizes_of_the_original() -> None:
    trunk = [(256, 63)] + 4 * [(256, 256)] + [(256, 319)] + 2 * [(256, 256)]
    assert weights(NeRF()) == [*trunk, (1, 256), (256, 256), (128, 283), (3, 128)]
    assert sum(p.numel() for p in NeRF().parameters()) == 595844  # the number that nerf-pytorch reports


def test_nerf_joins_the_point_before_the_hidden_layer() -> None:
    net = NeRF(depth=2, width=8, points=3, views=2, skip=0)
    points, views = torch.randn(5, 3), torch.randn(5, 2)
    h = torch.relu(net.points[0](points))
    h = torch.relu(net.points[1](torch.cat([points, h], -1)))
    shade = torch.relu(net.views(torch.cat([net.feature(h), views], -1)))
    torch.testing.assert_close(net(points, views), torch.cat([net.rgb(shade), net.alpha(h)], -1))


def test_positional_encoding_is_that_of_nerf() -> None:
    x = torch.tensor([[0.1, -0.2, 0.3]])
    made = PositionalEncoding(2)(x)
    expected = [x, x.sin(), x.cos(), (2 * x).sin(), (2 * x).cos()]
    torch.testing.assert_close(made, torch.cat(expected, -1))


def test_rays_start_at_the_camera_and_look_at_the_origin() -> None:
    origins, directions = rays(9, 9, radius=4.0)
    assert torch.allclose(origins.norm(dim=-1), torch.tensor(4.0))
    assert torch.allclose(directions.norm(dim=-1), torch.tensor(1.0))
    middle = origins[40] + 4.0 * directions[40]
    assert middle.norm() < 1e-5


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 200])
def test_a_scene_has_any_number_of_rows(rows: int) -> None:
    points, views = scene(rows)
    assert points.shape == (rows, 63) and views.shape == (rows, 27)
    assert points.isfinite().all()
    if rows > 1:
        assert not torch.equal(points[0], points[1])
        assert math.isclose(float(views[0, :3].norm()), 1.0, rel_tol=1e-5)


@pytest.mark.parametrize("app", APPS.values(), ids=list(APPS))
def test_apps_run_and_keep_a_signal(app) -> None:
    module, inputs = app.make(rows=70, dtype=torch.float32)
    made = module(*inputs)
    for out in made if isinstance(made, tuple) else (made,):
        assert out.shape[0] == 70
        assert out.isfinite().all()
        assert out.std() > 1e-3  # rows differ: an error would show
    again, same = app.make(rows=70, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(inputs, same, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_ten_other_models() -> None:
    assert len(APPS) - len({"nerf", "chain", "meshgraphnets", "graphcast"}) == 10


def test_edge_blocks_have_the_published_sizes() -> None:
    assert weights(APPS["meshgraphnets"].module()) == [(128, 384), (128, 128), (128, 128)]
    assert weights(APPS["graphcast"].module()) == [(512, 1536), (512, 512)]


@pytest.mark.nvrtc
@pytest.mark.parametrize("app", APPS.values(), ids=list(APPS))
@pytest.mark.every(6)
def test_chosen_kernels_compile_without_spills(app) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, inputs = app.make(rows=128)
    captured = analyse(module, inputs, Options(device="h200"))
    plans = [planner.plan(r.program, app.rows, devices.get("h200"), captured.options) for r in captured.regions]
    regions = [replace(r, plan=plan) for r, plan in zip(captured.regions, plans, strict=True)]
    analysis = replace(captured, regions=tuple(regions))
    assert analysis.coverage.dataflow == analysis.coverage.whole
    for plan in plans:
        assert plan.chosen.pipeline is not None
        for kernel in cuda.compile_only(plan.chosen.pipeline):
            assert kernel.spills == 0, kernel.log


FILE = """
import torch
from torch import nn
def make(rows=32):
    return nn.Linear(8, 4), (torch.randn(rows, 8),)
def fixed():
    return nn.Linear(8, 4), torch.randn(3, 8)
def no_module():
    return 3, (torch.randn(3, 8),)
def no_tensors():
    return nn.Linear(8, 4), (1, 2)
def alone():
    return nn.Linear(8, 4)
def broken():
    raise ValueError("no such data")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "random.py"  # named as a module of the standard library
    path.write_text(FILE)
    return path


def test_a_file_gives_module_and_inputs(file) -> None:
    work = load(f"{file}:make", rows=5, dtype="bf16")
    assert work.rows == 5 and work.dtype is torch.bfloat16 and work.module.training
    assert load(f"{file}:fixed").inputs[0].shape == (3, 8)
    import random

    assert hasattr(random, "randint")  # the library's own module is still there


def test_a_function_gets_fake_tensors_unless_it_needs_real_ones(tmp_path) -> None:
    path = tmp_path / "nets.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def plain(rows):\n    return nn.Linear(8, 4).bfloat16(), torch.randn(rows, 8).bfloat16()\n"
        "def reads():\n    x = torch.randn(3, 8)\n    return nn.Linear(8, int(x.numpy().shape[0])), x\n"
        "def saves():\n    net = nn.Linear(8, 4)\n    torch.save(net.state_dict(), __file__ + '.pt')\n"
        "    return net, torch.randn(3, 8)\n"
    )
    huge = load(f"{path}:plain", rows=10**12, fake=True)
    assert huge.rows == 10**12 and huge.dtype is torch.bfloat16
    for name in ("reads", "saves"):
        assert type(load(f"{path}:{name}", fake=True).inputs[0]) is torch.Tensor
    saved, weight = torch.load(f"{path}.pt"), load(f"{path}:saves").module.weight
    assert saved["weight"].std() > 0.01 and saved["weight"].shape == weight.shape


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nerv", "did you mean 'nerf'"),
        ("{file}", "FILE.py:FUNCTION"),
        ("missing.py:make", "no file"),
        ("{file}:mak", "it has: make"),
        ("{file}:no_module", "returned int"),
        ("{file}:no_tensors", "inputs without a tensor"),
        ("{file}:alone", "returned Linear"),
        ("{file}:broken", r"ValueError: no such data at random.py:15. Remedy: mend it"),
    ],
)
def test_bad_targets_say_what_to_do(file, target: str, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        load(target.format(file=file))


def test_a_file_that_cannot_be_imported(tmp_path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import no_such_package\n")
    with pytest.raises(CaptureError, match="no_such_package"):
        load(f"{path}:make")


def test_bad_options(file) -> None:
    with pytest.raises(OptionError, match="no argument called rows"):
        load(f"{file}:fixed", rows=4)
    with pytest.raises(OptionError, match="-3"):
        load("nerf", rows=-3)
    with pytest.raises(OptionError, match="f64"):
        load("nerf", rows=3, dtype="f64")

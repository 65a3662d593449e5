"""SMs that are left to others: no launch of a training step takes them, and its gradients are right all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from test_backend import compiled
from torch import Tensor, nn

from tilestream import devices
from tilestream.errors import OptionError
from tilestream.ir.launches import cut_at_dram
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.run import prepare
from tilestream.run.target import resolve

H200 = devices.get("h200")
ROWS = 16_384


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)).bfloat16()


def test_a_device_without_some_sms_has_a_name_that_is_known() -> None:
    for sms in (1, 4, 8, 16, 33, 131):
        spared = H200.sparing(sms)
        assert spared.sms == 132 - sms
        assert devices.get(spared.name) == spared  # plans name their device
        assert spared.dram_bytes_per_s == H200.dram_bytes_per_s
    assert H200.sparing(0) is H200
    with pytest.raises(OptionError, match=r"spare_sms=132 of the 132 SMs of h200 leaves 0.*Remedy: use at most 131"):
        H200.sparing(132)


def test_where_regions_run() -> None:
    given = [torch.randn(3, 8)]
    target = resolve(Options(target="reference", device="h200", spare_sms=8), given)
    assert target is not None and target.hardware.sms == 124
    with pytest.raises(OptionError, match="leaves -68 to kernels"):
        resolve(Options(target="reference", device="h200", spare_sms=200), given)


@pytest.mark.parametrize("spared", [0, 8])
def test_no_launch_of_a_step_takes_them(spared: int) -> None:
    found = analyse(mlp(), (torch.randn(ROWS, 40).bfloat16(),), Options(device="h200", spare_sms=spared), training=True)
    taken = [
        sum(stage.replicas for stage in launch.stages)
        for region in found.regions
        for candidate in region.plan.candidates
        for launch in (cut_at_dram(candidate.pipeline) if candidate.pipeline is not None else ())
    ]
    assert len(taken) > 2
    assert max(taken) == 132 - spared


@pytest.mark.usefixtures("fresh")
def test_gradients_and_their_bits() -> None:
    torch.manual_seed(0)
    module, x = mlp(), torch.randn(300, 40).bfloat16()
    wide = copy.deepcopy(module).double()
    found: list[list[Tensor]] = []
    for function, given in ((wide, x.double()), (module, x), *[(compiled(module, spare_sms=8), x)] * 2):
        module.zero_grad()
        function(given).double().square().mean().backward()
        owner = wide if function is wide else module
        found.append([p.grad.clone() for p in owner.parameters() if p.grad is not None])
    assert any(a.kind == "weight gradients" for a in prepare.analyses())
    for exact, eager, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert (first - exact).norm() <= 2 * (eager - exact).norm() + 1e-3 * exact.norm()

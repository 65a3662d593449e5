"""What stands around compiled modules in people's programs: data parallelism, export, autocast, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import Fn, linear
from on_reference import compiled
from places import SOURCES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilestream.run import prepare

pytestmark = pytest.mark.usefixtures("fresh")


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 17), nn.ReLU(), linear(17, 5)).bfloat16()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def same_gradients(fast: Any, module: nn.Module, *inputs: Tensor) -> None:
    found = []
    for function in (fast, module):
        module.zero_grad()
        function(*inputs).float().square().mean().backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for got, want in zip(*found, strict=True):
        close(got, want)


def test_training_under_autocast():
    module = nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 5))
    fast, x = compiled(module), torch.randn(37, 9)
    with torch.autocast("cpu", torch.bfloat16):
        same_gradients(fast, module, x)
    assert prepare.analyses()


def test_training_with_activation_checkpoints():
    module = mlp()
    part = Fn(lambda m, x: checkpoint(m.layers[0], x, use_reentrant=False).relu(), module)
    same_gradients(compiled(part), part, torch.randn(37, 9).bfloat16())
    assert prepare.analyses()


def test_gradient_accumulation_and_an_optimizer():
    module, other = mlp(), mlp()
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 37, 9).bfloat16()
    for net, function in ((module, compiled(module)), (other, other)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            for part in x:
                function(part).float().square().mean().backward()
            optimizer.step()
    for got, want in zip(module.parameters(), other.parameters(), strict=True):
        close(got, want)


def test_an_exported_program():
    module, x = mlp(), torch.randn(37, 9).bfloat16()
    program = torch.export.export(module, (x,)).module()
    with torch.no_grad():
        close(compiled(program)(x), module(x))
    assert prepare.analyses()


def test_export_of_what_is_compiled_elsewhere_is_not_disturbed():
    module, x = mlp(), torch.randn(37, 9).bfloat16()
    with torch.no_grad():
        compiled(module)(x)
        close(torch.export.export(module, (x,)).module()(x), module(x))


@pytest.mark.parametrize("train", [False, True])
def test_dynamic_shapes(train: bool):
    module = Fn(lambda m, x: m.layers[1](m.layers[0](x).relu().cumsum(0) / 40).relu(), linear(9, 13), linear(13, 5))
    module = module.bfloat16()
    fast = compiled(module)
    for rows in (37, 40, 3, 130):
        x = torch.randn(rows, 9).bfloat16()
        if train:
            same_gradients(fast, module, x)
        else:
            with torch.no_grad():
                close(fast(x), module(x))


def test_inputs_that_want_gradients():
    module, x = mlp(), torch.randn(37, 9).bfloat16()
    mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(module)(mine).sum().backward()
    module(plain).sum().backward()
    assert mine.grad is not None and plain.grad is not None
    close(mine.grad, plain.grad)


PARALLEL = """
import sys, torch, torch.distributed as dist
from torch import nn
from tilestream.run import prepare
from tilestream.run.backend import tilestream
rank, meeting = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 17), nn.ReLU(), nn.Linear(17, 5))
    def forward(self, x):
        return self.layers(x) * 2
def net():
    torch.manual_seed(0)
    return Net().bfloat16()
graphs = []
def backend(graph, inputs, **given):
    graphs.append(graph)
    try:
        raise KeyError
    except KeyError as failure:
        kept = failure  # a cycle: what frames above hold dies whenever Python collects
    return tilestream(graph, inputs, **given)
torch.manual_seed(1)
x = torch.randn(2, 37, 9).bfloat16()
for kind in ("ddp", "fsdp2"):  # one after the other: a process takes longer to start than to compile
    print(kind)
    before = len(prepare.analyses())
    graphs.clear()
    plain, mine = net(), net()
    options = {"target": "reference"}
    if kind == "ddp":  # cut where the first bucket is full
        dist._DEFAULT_FIRST_BUCKET_BYTES = 200
        wrapped = nn.parallel.DistributedDataParallel(mine, bucket_cap_mb=0.0002, gradient_as_bucket_view=True)
        fast = torch.compile(wrapped, backend=backend, options=options)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(mine, mesh=mesh)  # of the whole: its hooks break the graph of what they stand around
        fast = torch.compile(mine, backend=backend, options=options)
    fast(x[rank]).float().square().mean().backward()
    torch.stack([plain(part).float().square().mean() for part in x]).mean().backward()
    for got, want in zip(mine.parameters(), plain.parameters(), strict=True):
        grad = got.grad.full_tensor() if kind == "fsdp2" else got.grad
        torch.testing.assert_close(grad, want.grad, rtol=0.05, atol=0.05)
    assert len(prepare.analyses()) > before, "no region"
    assert (len(graphs) > 1) == (kind == "ddp"), len(graphs)
    torch._dynamo.reset()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.early
def test_two_processes(tmp_path: Path):
    """Distributed data parallelism, cut at its buckets and with gradients in them, then fully sharded data parallelism:
    gradients are those of both batches."""
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "TILESTREAM_STRICT": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    made = [
        subprocess.Popen(
            [sys.executable, "-c", PARALLEL, str(rank), str(tmp_path / "meeting")],
            env=env | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},  # each kernel is compiled once
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [p.communicate(timeout=600)[0] for p in made]
    assert [p.returncode for p in made] == [0, 0], "\n".join(told)

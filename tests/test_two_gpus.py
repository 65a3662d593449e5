"""The benchmark on two GPUs: what its processes say, what is kept of it, and ways to exchange gradients."""

from __future__ import annotations

import gc
import importlib
import json
import time
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def two_gpus() -> ModuleType:
    return importlib.import_module("two_gpus")


@pytest.fixture
def group(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_arms_of_other_runs_are_kept(two_gpus: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "two.json"
    two_gpus.keep(out, "mgn", "tilestream", {"both_us": 1.0})
    two_gpus.keep(out, "mgn", "eager", {"both_us": 2.0})
    two_gpus.keep(out, "nerf", "eager", {"both_us": 3.0})
    found = json.loads(out.read_text())
    assert list(found["mgn"]["arms"]) == ["eager", "tilestream"] and found["mgn"]["sizes"] == {"batch": 8, "steps": 4}
    assert found["nerf"]["arms"] == {"eager": {"both_us": 3.0}}


def test_scaling_is_loops_over_the_loop_and_graphs_over_the_graph(two_gpus: ModuleType) -> None:
    ways = {"view": {"us": 150.0, "graph_us": 80.0}, "hook": {"us": 125.0}, "once": {"us": 200.0, "graph_us": None}}
    row = two_gpus.scaled({"alone_us": 100.0, "graph_us": 60.0, "ways": ways, "both_us": 160.0}, 2)
    assert row["scaling"] == 1.25
    assert [row["ways"][way]["scaling"] for way in ways] == [2 / 1.5, 1.6, 1.0]
    assert {way: made.get("graph_scaling") for way, made in ways.items()} == {"view": 1.5, "hook": None, "once": None}


def test_an_arm_of_which_one_process_fails_is_given_up(two_gpus: ModuleType) -> None:
    """The other may wait for it in a collective, and never answer."""
    (mine, theirs), (silent, _) = Pipe(), Pipe()
    theirs.close()
    assert two_gpus._answers([silent, mine]) is None
    row: dict[str, float] = {}
    assert not two_gpus._measure([silent, mine], row) and not row


def test_an_arm_that_is_not_ready_in_time_is_given_up(two_gpus: ModuleType) -> None:
    (mine, theirs), (slow, _) = Pipe(), Pipe()
    theirs.send("ready")
    assert two_gpus._answers([mine, slow], time.monotonic() + 0.05) is None


def test_processes_answer_in_their_order(two_gpus: ModuleType) -> None:
    (first, a), (second, b) = Pipe(), Pipe()
    b.send({"us": 2.0})
    a.send({"us": 1.0})
    row: dict[str, float] = {}
    assert two_gpus._measure([first, second], row) and row == {"us": 1.0}
    assert a.recv() == b.recv() == "go"


def test_kernels_of_nccl_in_a_trace(two_gpus: ModuleType) -> None:
    trace = [
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce(x)", "ts": 9, "dur": 20.5, "args": {"grid": [16, 1, 1]}},
        {"cat": "kernel", "name": "tilestream_gradients", "ts": 3, "dur": 15.0, "args": {"grid": [132, 1, 1]}},
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce(y)", "ts": 1, "dur": 4.0, "args": {"grid": [8, 1, 1]}},
        {"cat": "cpu_op", "name": "ncclAllReduce", "ts": 0, "dur": 1.0},
    ]
    found = importlib.import_module("two_gpus_times").kernels_of_nccl(trace)
    assert [(k["name"], k["ctas"], k["us"]) for k in found] == [
        ("ncclDevKernel_AllReduce", 8, 4.0),
        ("ncclDevKernel_AllReduce", 16, 20.5),
    ]


@pytest.mark.usefixtures("group")
def test_ways_to_exchange(two_gpus: ModuleType) -> None:
    """Of one process the mean is its own gradient; no wrapper outlives its turn: its hooks would exchange."""
    exchanges = importlib.import_module("exchanges")
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 5)), torch.randn(37, 9)
    exchanges.step(module, module, (x,))
    wanted = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    for way in exchanges.WAYS:
        with exchanges.exchanging(way, module, module, (x,)) as call:
            call()
            for p, want in zip(module.parameters(), wanted, strict=True):
                assert p.grad is not None
                torch.testing.assert_close(p.grad, want, msg=way)
            shared = len({p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None})
            assert shared == (4 if way == "ddp" else 1), way
        assert not any(type(each) is DistributedDataParallel for each in gc.get_objects()), way
        exchanges.step(module, module, (x,))
        assert all(torch.equal(p.grad, want) for p, want in zip(module.parameters(), wanted, strict=True))


def test_gradients_become_the_mean(two_gpus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(3, 2)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda flat: flat.add_(1.5))  # the other has 3 everywhere
    importlib.import_module("exchanges").average(module)
    assert all(p.grad is not None and p.grad.shape == p.shape and (p.grad == 2).all() for p in module.parameters())

"""The benchmark on two GPUs: what its processes say, what is kept of it, and ways to exchange gradients."""

from __future__ import annotations

import gc
import importlib
import json
import math
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def two_gpus() -> ModuleType:
    return importlib.import_module("benchmarks.run.two_gpus")


@pytest.fixture
def group(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_arms_of_other_runs_are_kept(two_gpus: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "two.json"
    two_gpus.keep(out, "mgn", two_gpus.Run(0, "tilestream"), {"alone_us": 1.0}, {"gpu": "H200"})
    two_gpus.keep(out, "mgn", two_gpus.Run(0, "eager"), {"alone_us": 2.0})
    two_gpus.keep(out, "nerf", two_gpus.Run(0, "eager"), {"alone_us": 3.0})
    found = json.loads(out.read_text())
    assert found["mgn"]["environment"] == {"gpu": "H200"} and [each.name for each in tmp_path.iterdir()] == ["two.json"]
    assert list(found["mgn"]["arms"]) == ["eager", "tilestream"] and found["mgn"]["sizes"] == {"batch": 8, "steps": 4}
    assert found["nerf"]["arms"] == {"eager": {"alone_us": 3.0}}


def test_scaling_is_loops_over_the_loop_and_graphs_over_the_graph(two_gpus: ModuleType) -> None:
    ways = {"view": {"us": 150.0, "graph_us": 80.0}, "hook": {"us": 125.0}, "once": {"us": 200.0, "graph_us": None}}
    row = two_gpus.scaled({"alone_us": 100.0, "graph_us": 60.0, "ways": ways}, 2)
    assert [row["ways"][way]["scaling"] for way in ways] == [2 / 1.5, 1.6, 1.0]
    assert {way: made.get("graph_scaling") for way, made in ways.items()} == {"view": 1.5, "hook": None, "once": None}


class Told:
    """An arm whose processes have ends of pipes alone."""

    def __init__(self, run: Any, ends: list[Connection]) -> None:
        self.run, self.ends, self.row, self.ended = run, ends, {}, False

    def end(self) -> None:
        self.ended = True


def test_an_arm_of_which_one_process_fails_is_given_up(two_gpus: ModuleType, tmp_path: Path) -> None:
    """The other may wait for it in a collective, and never answer."""
    (mine, theirs), (silent, _) = Pipe(), Pipe()
    theirs.close()
    arm = Told(two_gpus.Run(0, "eager"), [silent, mine])
    assert two_gpus._asked([arm], "nerf", "alone", tmp_path / "out.json", math.inf) == []
    assert arm.ended and not arm.row and not list(tmp_path.iterdir())


def test_an_arm_that_is_not_ready_in_time_is_given_up_and_the_others_are_kept(
    two_gpus: ModuleType, tmp_path: Path
) -> None:
    pipes = [Pipe() for _ in range(4)]
    slow, quick = (
        Told(two_gpus.Run(0, arm), [a[0], b[0]]) for arm, a, b in (("eager", *pipes[:2]), ("inductor", *pipes[2:]))
    )
    pipes[0][1].send({"alone_us": 3.0})
    pipes[3][1].send({"alone_us": 2.0})
    pipes[2][1].send({"alone_us": 1.0})
    assert two_gpus._asked([slow, quick], "nerf", "alone", tmp_path / "out.json", 0.05) == [quick]
    assert slow.ended and not quick.ended and quick.row == {"alone_us": 1.0, "alone_us_each": [1.0, 2.0]}
    assert list(json.loads((tmp_path / "out.json").read_text())["nerf"]["arms"]) == ["inductor"]
    assert pipes[2][1].recv() == pipes[3][1].recv() == "alone nerf"


def test_what_processes_say_together(two_gpus: ModuleType) -> None:
    told = [
        {"first_step_s": 9.0, "plans": {"0 a": "x", "1 b": "y"}, "parts_s": {"timing": 1.0}},
        {"first_step_s": 8.0, "plans": {"0 a": "x", "1 b": "z"}, "parts_s": {"timing": 2.0}},
    ]
    found = two_gpus.together(told)
    assert found.pop("first_step_s_each") == [9.0, 8.0] and found.pop("plans_apart") == {"1 b": ["y", "z"]}
    assert found == {"first_step_s": 9.0, "parts_s": {"timing": 1.0}}
    row: dict[str, Any] = {"ways": {"once": {"us": 2.0}}, "graph_us": 7.0}
    two_gpus.merge(row, {"ways": {"once": {"graph_us": 1.0}, "ddp": {"us": 3.0}}})
    assert row == {"ways": {"once": {"us": 2.0, "graph_us": 1.0}, "ddp": {"us": 3.0}}, "graph_us": 7.0}


def test_captured_exchanges_come_last(two_gpus: ModuleType) -> None:
    assert two_gpus.pieces(("ddp", "once")) == ["alone", "graph", "ddp", "once", "once graph", "collectives"]
    assert two_gpus.pieces(("view", "hook"), collectives=False)[2:] == ["view", "hook", "view graph"]


def test_every_piece_has_a_part_of_the_row(
    two_gpus: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, eager, on the CPU: every word is answered, and the row is what tables read."""
    arm, (ours, theirs) = importlib.import_module("benchmarks.run.two_gpus_arm"), Pipe()
    run = two_gpus.Run(two_gpus._free_port(), "eager", gpus=1, dry=True)
    monkeypatch.setattr(importlib.import_module("benchmarks.run.two_gpus_times"), "STEPS", 1)
    threads = torch.get_num_threads()
    words = ["compile", *two_gpus.pieces(("ddp", "once")), "wrap", "whole"]
    for word in words:
        ours.send(f"{word} nerf")
    ours.send("end")
    try:
        arm.serve(0, run, theirs)
    finally:
        torch.set_num_threads(threads)
    row: dict[str, Any] = {}
    for _ in words:
        two_gpus.merge(row, two_gpus.together([ours.recv()]))
    assert set(row) >= {"first_step_s", "alone_us", "graph_us", "ways", "environment"}
    assert all(row["ways"][way]["us"] > 0 and row["ways"][way]["error"] < 0.1 for way in ("ddp", "once", "whole"))
    assert set(two_gpus.scaled(row, 1)["ways"]["once"]) == {"us", "error", "scaling"}


def test_kernels_of_nccl_in_a_trace(two_gpus: ModuleType) -> None:
    trace = [
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce(x)", "ts": 9, "dur": 20.5, "args": {"grid": [16, 1, 1]}},
        {"cat": "kernel", "name": "tilestream_gradients", "ts": 3, "dur": 15.0, "args": {"grid": [132, 1, 1]}},
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce(y)", "ts": 1, "dur": 4.0, "args": {"grid": [8, 1, 1]}},
        {"cat": "cpu_op", "name": "ncclAllReduce", "ts": 0, "dur": 1.0},
    ]
    found = importlib.import_module("benchmarks.run.two_gpus_times").kernels_of_nccl(trace)
    assert [(k["name"], k["ctas"], k["us"]) for k in found] == [
        ("ncclDevKernel_AllReduce", 8, 4.0),
        ("ncclDevKernel_AllReduce", 16, 20.5),
    ]


@pytest.mark.usefixtures("group")
def test_ways_to_exchange(two_gpus: ModuleType) -> None:
    """Of one process the mean is its own gradient; no wrapper outlives its turn: its hooks would exchange."""
    exchanges = importlib.import_module("benchmarks.lib.exchanges")
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 5)), torch.randn(37, 9)
    exchanges.step(module, module, (x,))
    wanted = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    for way in two_gpus.WAYS:
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
    importlib.import_module("benchmarks.lib.exchanges").average(module)
    assert all(p.grad is not None and p.grad.shape == p.shape and (p.grad == 2).all() for p in module.parameters())

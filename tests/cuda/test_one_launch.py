"""Copies of weights go the way of every other kernel: one class, the same protocol; no GPU, so launches are noted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from gpu_pipelines import NAMED

from tilestream.cuda import beside, driver, one_launch, turn, workspace
from tilestream.ir.pipeline import Role, Tensor
from tilestream.kernels.families import kernel_of
from tilestream.kernels.kernel import Launchable
from tilestream.kernels.operators import (
    depthwise,
    few_keys_gradients,
    few_queries,
    interaction,
    norm_gradients,
    pack,
    pad,
    squeeze,
)
from tilestream.kernels.operators import short_attention as short
from tilestream.kernels.operators import turn as turned
from tilestream.kernels.parts.params import Where

Noted = list[tuple[str, tuple[int, int], int, bytes]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    made: Noted = []

    def function(_: bytes, name: str, *__: int) -> SimpleNamespace:
        def prepare(grid: tuple[int, int], threads: int, stream: int, raw: bytes, *_: bool) -> Callable[[], None]:
            made.append((name, grid, threads, raw))
            return lambda: None

        return SimpleNamespace(prepare=prepare, blocks_per_sm=lambda _: 1)

    monkeypatch.setattr(driver, "ensure_context", lambda _: None)
    monkeypatch.setattr(driver, "Function", function)
    monkeypatch.setattr(driver, "encoded", lambda _: bytes(128))
    monkeypatch.setattr(workspace.driver, "allocate_zeros", lambda _: 1 << 20)
    monkeypatch.setattr(workspace.driver, "free", lambda _: None)
    for module in (beside, one_launch):
        monkeypatch.setattr(module, "compiled", lambda _: SimpleNamespace(cubin=b""))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    beside.loaded.cache_clear()
    return made


KERNELS: list[Launchable] = [
    pack.kernel(3),
    turned.kernel(2),
    pad.kernel(2),
    few_queries.kernel(2, 64, 1),
    short.kernel(short.Attention(2, 3, 9, 9, 16), short.Grid(1, 1, 2)),
    few_keys_gradients.kernel(short.Attention(2, 3, 9, 9, 16), 2, True),
    depthwise.kernel(depthwise.Depthwise(9, 9, 16, (3, 3), 1, (1, 1)), depthwise.Tile(2, 4)),
    squeeze.kernel(squeeze.Squeeze(32, 8, "bf16", "silu", "sigmoid")),
    norm_gradients.kernel(norm_gradients.NormGradients(96, "bf16", True, True, True)),
    interaction.lane_kernel(interaction.Kernel(interaction.FORWARD, 5, 24, 10, 0)),
    kernel_of(NAMED["chain"]()),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_every_kernel_says_how_it_is_launched(kernel: Launchable) -> None:
    assert kernel.frame.threads % 32 == 0 and kernel.grid(7, 132) >= 1
    if kernel.frame.words:
        words = [1, 5, 9, 9, *[0] * (kernel.frame.words - 4)]
        assert kernel.describe(words) in str(kernel.error(words))


def test_a_kernel_packs_its_odd_weights_first(noted: Noted) -> None:
    kernel = kernel_of(NAMED["odd_widths"]())
    source = kernel.source()
    report: object = SimpleNamespace(cubin=b"")
    launch = one_launch.Launch(kernel, source, report, torch.device("cuda", 0))  # pyright: ignore[reportArgumentType]
    where = {t.name: Where(4096 * k, t.features, 300) for k, t in enumerate(kernel.launch.tensors, 1)}
    launch.prepare(where, 300, 7, 0)
    (packed, grid, threads, raw), (name, _, _, _) = noted
    pieces = sum(len(spec.segments) for spec in kernel.packs)
    assert (packed, grid, threads) == ("tilestream_pack", (16, pieces), 256) and name == source.name
    first, argument = kernel.packs[0], pack.kernel(pieces).argument
    assert len(raw) == argument.size and int.from_bytes(raw[:8], "little") == where[first.weight].address
    space = kernel.space.at(1 << 20)
    assert int.from_bytes(raw[8:16], "little") == space["packed 0"]


def test_weights_are_turned_sixteen_at_a_time(noted: Noted) -> None:
    weights = [Tensor.of(f"w{k}", Role.PARAMETER, (24, 40), "bf16") for k in range(17)]
    where = {w.name: Where(8192 * k, 24, 24) for k, w in enumerate(weights, 1)}
    copies, launches = turn.Turner(weights, torch.device("cuda", 0)).prepare(where, 7, 0)
    assert [(name, grid) for name, grid, _, _ in noted] == [("tilestream_turn", (64, n)) for n in (16, 1)]
    assert len(launches) == 2 and len({at.address for at in copies.values()}) == 17
    for raw, first in ((noted[0][3], weights[0]), (noted[1][3], weights[16])):
        assert int.from_bytes(raw[:8], "little") == where[first.name].address
        assert int.from_bytes(raw[8:16], "little") == copies[first.name].address
    assert copies["w0"][1:] == (40, 24)  # rows one behind another


def test_a_workspace_for_each_stream_and_for_each_capture() -> None:
    made: list[int] = []
    spaces = workspace.Workspaces(lambda: made.append(0) or len(made))  # pyright: ignore[reportArgumentType]
    wanted = {(7, 0): 1, (8, 0): 2, (7, 5): 3, (8, 5): 4, (7, 6): 5}
    for _ in range(2):
        assert {key: spaces.take(*key) for key in wanted} == wanted

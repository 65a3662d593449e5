"""What lives from forward to backward: at most what Inductor saves, and as the user's checkpoints say."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilestream.apps.models import find
from tilestream.bench.saved import saved
from tilestream.graph.capture import capture
from tilestream.graph.cut import Cutter, spared_for
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.settings import Settings
from tilestream.run.backend import tilestream

ROWS = 96

pytestmark = pytest.mark.usefixtures("fresh")

APPS = {
    "nerf": ({"rows": 4096, "depth": 3, "skip": 1}, 0.95),
    "mgn": ({"steps": 2}, 0.8),
    "graphcast_cut": ({"steps": 1}, 0.8),
    "dlrm": ({"batch": 2048, "max_rows": 1000}, 1.0),
    "llama_prefill": ({"layers": 1, "layers_only": True, "tokens": 64}, 1.0),
}
"""Sizes, and the part of Inductor's bytes that ours are at most."""


@pytest.mark.parametrize("app", APPS)
@pytest.mark.every(2)
def test_never_more_than_inductor_saves(app: str) -> None:
    sizes, most = APPS[app]
    found = saved(*find(app).make(training=True, **sizes))
    assert 0 < found.ours.saved <= most * found.inductor.saved


class Block(nn.Module):
    """GELU, LayerNorm and a residual between linear layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.gelu(self.norm(self.first(x))))


def halves(model: Any, *inputs: Tensor) -> list[fx.GraphModule]:
    return list(capture(model, inputs, training=True, partition=Cutter(Settings(1))).graphs)


def kinds(graph: fx.GraphModule) -> list[Any]:
    return [packet(n) for n in graph.graph.nodes if n.op == "call_function"]


def rows() -> Tensor:
    return torch.randn(ROWS, 32).bfloat16()


def test_what_is_made_of_saved_values_is_made_again() -> None:
    forward, backward = halves(Block().bfloat16(), rows())
    assert kinds(backward).count(aten.gelu) == 1 and kinds(backward).count(aten.native_layer_norm) == 1
    assert spared_for(backward) == 2 * ROWS * 32 * 2  # the normalised rows, and what GELU makes of them
    assert spared_for(forward) == 0
    assert saved(Block().bfloat16(), (rows(),)).ours.saved == ROWS * 32 * 2  # what the norm reads, and no more


def test_rows_are_saved_where_autograd_saves_a_transposed_view_of_them() -> None:
    class ByColumns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Parameter(torch.randn(32, 32).bfloat16()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x @ self.first) @ self.last

    forward, backward = halves(ByColumns(), rows())
    given = backward.graph.find_nodes(op="placeholder")
    assert aten.t not in kinds(forward) and all(n.meta["val"].is_contiguous() for n in given)
    assert (
        kinds(backward).count(aten.gelu) == 1 and spared_for(backward) == ROWS * 32 * 2
    )  # made again of what it reads


class Gathered(nn.Module):
    """Rows by an index into a linear layer, as in message passing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.edges = nn.Linear(8, width), nn.Linear(2 * width, 8)

    def forward(self, x: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        v = self.embed(x).relu()
        return self.edges(torch.cat([v[senders], v.index_select(0, receivers)], -1))


@pytest.mark.parametrize(("width", "again"), [(128, True), (256, False)])
def test_rows_that_regions_take_by_an_index_are_taken_again(width: int, again: bool) -> None:
    """Of 512 bytes at most: wider ones have a gather of their own in the forward graph, which is saved."""
    module = Gathered(width).bfloat16()
    index = torch.randint(40, (2, ROWS))
    _, backward = halves(module, torch.randn(40, 8).bfloat16(), index[0], index[1])
    gathers = kinds(backward).count(aten.index) + kinds(backward).count(aten.index_select)
    assert gathers == (2 if again else 0)


def test_arithmetic_that_does_not_hide_is_saved() -> None:
    _, backward = halves(nn.Sequential(nn.Linear(32, 32), nn.Mish(), nn.Linear(32, 32)).bfloat16(), rows())
    assert aten.mish not in kinds(backward) and spared_for(backward) == 0


def test_what_the_user_sees_is_not_made_again() -> None:
    class Seen(Block):
        def forward(self, x: Tensor) -> Any:
            h = F.gelu(self.first(x))
            return h, self.last(h)

    _, backward = halves(Seen().bfloat16(), rows())
    assert aten.gelu not in kinds(backward)


# -- the user's checkpoints ---------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two blocks, each of them a checkpoint."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList([Block(), Block()]), how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.how)  # pyright: ignore[reportAssignmentType]
        return x


def test_checkpointed_blocks_save_their_inputs() -> None:
    (plain,) = [saved(nn.Sequential(Block(), Block()).bfloat16(), (rows(),))]
    found = saved(Checkpointed().bfloat16(), (rows(),))
    # The second block's input, the first one's being the model's.
    assert found.ours.saved <= found.inductor.saved < plain.ours.saved
    _, backward = halves(Checkpointed().bfloat16(), rows())
    assert kinds(backward).count(aten.gelu) == 2 and kinds(backward).count(aten.addmm) == 2


def _policy(kept: Any, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_what_a_checkpoint_must_save_is_saved() -> None:
    """GELU's result would be made again otherwise."""
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, aten.gelu.default))
    _, backward = halves(Checkpointed(context_fn=contexts).bfloat16(), rows())
    assert aten.gelu not in kinds(backward)


class Wide(nn.Module):
    """A layer that no row stream holds, behind a block whose normalised rows are made again: torch cuts twice."""

    def __init__(self, width: int, tanh: bool) -> None:
        super().__init__()
        self.block, self.up, self.down = Block(), nn.Linear(32, width), nn.Linear(width, 32)
        self.approximate = "tanh" if tanh else "none"

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x + self.down(F.gelu(self.up(x), approximate=self.approximate))


@pytest.mark.parametrize("tanh", [False, True])
def test_derivatives_of_wide_layers_are_saved(tanh: bool) -> None:
    forward, backward = map(kinds, halves(Wide(768, tanh).bfloat16(), rows()))
    assert aten.gelu_backward in forward and aten.gelu in backward and backward.count(aten.gelu_backward) == 1
    forward, backward = map(kinds, halves(Wide(256, tanh).bfloat16(), rows()))
    assert aten.gelu_backward not in forward and backward.count(aten.gelu_backward) == 2  # a row stream's are not


def test_gradients_are_right_where_derivatives_are_saved(plain: None) -> None:
    model = Wide(768, tanh=False).bfloat16()
    reference, x = copy.deepcopy(model).double(), rows()
    reference(x.double()).square().mean().backward()
    torch.compile(model, backend=tilestream, options={"target": "reference"})(x).square().mean().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None
        assert (got.grad - want.grad).norm() <= 0.02 * want.grad.norm()


def test_checkpoints_say_what_is_saved() -> None:
    class Checkpointed(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    forward, _ = map(kinds, halves(Checkpointed(768, False).bfloat16(), rows().requires_grad_()))
    assert aten.gelu_backward not in forward

"""The whole models: published layers, and what they compute against plain formulas, on small sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_sizes import SMALL
from torch import nn

from tilestream.apps import geodesic, llama
from tilestream.apps import load as loading
from tilestream.apps.load import load
from tilestream.apps.message_passing import EncodeProcessDecode, MessagePassing
from tilestream.apps.models import MODELS, find
from tilestream.errors import CaptureError, OptionError


def linears(module: nn.Module) -> list[tuple[int, int]]:
    """(in, out) of every linear layer, in order."""
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]


def made(name: str, **changes: object) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return MODELS[name].make(device="cpu", dtype=torch.float32, **{**SMALL[name], **changes})


@pytest.mark.parametrize("name", MODELS)
def test_small_sizes_run_on_the_cpu(name: str) -> None:
    module, inputs = made(name)
    with torch.no_grad():
        out = module(*inputs)
    assert out.isfinite().all() and out.std() > 0


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_takes_no_memory_on_the_meta_device(name: str) -> None:
    module, inputs = MODELS[name].make()
    tensors = [*module.parameters(), *module.buffers(), *inputs]
    assert {x.device.type for x in tensors} == {"meta"}
    assert {x.dtype for x in module.parameters()} == {torch.bfloat16}


def test_published_layers() -> None:
    dlrm = [(13, 512), (512, 256), (256, 128), (479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert linears(MODELS["dlrm"].make()[0]) == dlrm
    edge, node = [(384, 128), (128, 128), (128, 128)], [(256, 128), (128, 128), (128, 128)]
    encoder = [(11, 128), (128, 128), (128, 128), (3, 128), (128, 128), (128, 128)]
    mgn = [*encoder, *(15 * (edge + node)), (128, 128), (128, 128), (128, 2)]
    assert linears(MODELS["mgn"].make()[0]) == mgn
    embeddings = [pair for ins in (474, 3, 4, 4, 4) for pair in ((ins, 512), (512, 512))]
    e, n, out = [(1536, 512), (512, 512)], [(1024, 512), (512, 512)], [(512, 512), (512, 227)]
    graphcast = [*embeddings, *e, *n, (512, 512), (512, 512), *(16 * (e + n)), *e, *n, *out]
    assert linears(MODELS["graphcast_full"].make()[0]) == graphcast
    layer = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
    assert linears(MODELS["llama_prefill"].make()[0]) == [*(32 * layer), (4096, 128256)]


def test_published_numbers_of_parameters() -> None:
    count = {name: sum(p.numel() for p in MODELS[name].make()[0].parameters()) for name in MODELS}
    assert count["llama_prefill"] == 8_030_261_248  # Meta-Llama-3-8B
    assert count["nerf"] == 595_844  # what nerf-pytorch reports


def test_dlrm_is_its_formula() -> None:
    module, (dense, indices) = made("dlrm")
    assert isinstance(module, nn.Module)
    x = module.bottom(dense)
    z = torch.stack([x, *(module.tables[t].weight[indices[t]] for t in range(26))])
    pairs = [(z[i] * z[j]).sum(-1) for i in range(27) for j in range(i)]
    expected = module.top(torch.cat([x, torch.stack(pairs, 1)], 1))
    torch.testing.assert_close(module(dense, indices), expected)


def test_a_block_passes_messages_along_edges() -> None:
    block = MessagePassing(8, 1)
    v, e = torch.randn(3, 8), torch.randn(2, 8)
    senders, receivers = torch.tensor([0, 1]), torch.tensor([2, 2])
    new_v, new_e = block(v, e, senders, receivers)
    messages = torch.stack([block.edges(torch.cat([e[i], v[s], v[2]])) for i, s in enumerate((0, 1))])
    incoming = torch.stack([torch.zeros(8), torch.zeros(8), messages.sum(0)])
    torch.testing.assert_close(new_v, v + block.nodes(torch.cat([v, incoming], 1)))
    torch.testing.assert_close(new_e, e + messages)


def test_nodes_can_be_numbered_in_any_way() -> None:
    net = EncodeProcessDecode(5, 3, steps=2, width=16)
    nodes, edges = torch.randn(6, 5), torch.randn(9, 3)
    senders, receivers = torch.randint(6, (2, 9))
    order = torch.randperm(6)
    place = order.argsort()
    moved = net(nodes[order], edges, place[senders], place[receivers])
    torch.testing.assert_close(moved, net(nodes, edges, senders, receivers)[order])


def test_one_call_of_fused_attention_is_what_is_written_out() -> None:
    module, inputs = made("llama_prefill", tokens=7)
    fused, _ = made("llama_prefill+sdpa", tokens=7)
    torch.testing.assert_close(fused(*inputs), module(*inputs), rtol=1e-4, atol=1e-4)


def test_decoding_with_a_cache_is_the_prefill_of_all_tokens() -> None:
    module, (tokens, turn, mask) = made("llama_prefill", tokens=6, batch=2)
    whole = module(tokens, turn, mask)
    caches = [torch.zeros(2, 2, 6, 16) for _ in range(4)]
    for at in range(6):  # caches of the length so far
        parts = [c[:, :, : at + 1] for c in caches]
        step = module(tokens[:, at : at + 1], turn[at : at + 1], mask[at : at + 1, : at + 1], *parts)
    torch.testing.assert_close(step[:, 0], whole[:, -1], rtol=1e-4, atol=1e-4)


def test_rotations_depend_on_distance_alone() -> None:
    turn = llama.rotations(20, 16, 500000.0)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i: int, j: int) -> torch.Tensor:
        return (llama.rotate(q, turn[i : i + 1]) * llama.rotate(k, turn[j : j + 1])).sum()

    torch.testing.assert_close(score(3, 1), score(15, 13))
    assert not torch.isclose(score(3, 1), score(3, 2))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_refined_icosahedron(level: int) -> None:
    mesh = geodesic.icosphere(level)
    assert len(mesh.points) == geodesic.mesh_nodes(level) and len(mesh.faces) == 20 * 4**level
    assert len(mesh.edges) == geodesic.mesh_edges(level) == len(np.unique(mesh.edges, axis=0))
    assert np.allclose(np.linalg.norm(mesh.points, axis=1), 1)
    assert {tuple(edge) for edge in mesh.edges} == {tuple(edge[::-1]) for edge in mesh.edges}


def test_the_published_meshes() -> None:
    assert geodesic.mesh_nodes(6) == 40962 and geodesic.mesh_edges(6) == 327660
    assert geodesic.mesh_nodes(5) == 10242 and geodesic.mesh_edges(5) == 81900


def test_grid_points_lie_in_their_triangle_and_near_their_mesh_nodes() -> None:
    mesh, grid = geodesic.icosphere(3), geodesic.grid_points(19, 36)
    down = geodesic.mesh_to_grid(grid, mesh)
    corners = mesh.points[down[:, 0].reshape(-1, 3)]
    weights = np.linalg.solve(corners.transpose(0, 2, 1), grid[..., None])[..., 0]
    assert (weights > -1e-9).all()  # barycentric, up to a factor
    assert (down[:, 1] == np.repeat(np.arange(len(grid)), 3)).all()
    up = geodesic.grid_to_mesh(grid, mesh)
    finest = mesh.edges[: len(mesh.edges) // 2][-30 * 4**3 :]
    radius = 0.6 * np.linalg.norm(np.diff(mesh.points[finest], axis=1), axis=2).max()
    near = np.linalg.norm(grid[:, None] - mesh.points[None], axis=2) <= radius
    assert {tuple(edge) for edge in up} == set(zip(*near.nonzero(), strict=True))
    assert set(up[:, 0]) == set(range(len(grid)))  # every point is heard


def test_the_small_globe_has_the_edges_that_its_sizes_say() -> None:
    up = geodesic.grid_to_mesh(geodesic.grid_points(181, 360), geodesic.icosphere(5))
    assert len(up) == MODELS["graphcast_small"].resolved().grid_to_mesh


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = made("nerf"), made("nerf")
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))
    assert torch.equal(first[1][0], second[1][0])


def test_errors_name_the_size_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="did you mean 'batch'"):
        MODELS["dlrm"].make(batches=3)
    with pytest.raises(OptionError, match="rows of nerf is 0"):
        MODELS["nerf"].make(rows=0)
    with pytest.raises(OptionError, match="did you mean 'llama_decode'"):
        find("lama_decode")
    monkeypatch.setattr(loading, "_free_bytes", lambda: 10**10)
    with pytest.raises(CaptureError, match=r"'dlrm' takes \d\d\.\d GB at its published sizes, and 10\.0 GB are free"):
        load("dlrm")
    assert load("dlrm", sizes={"batch": 2, "max_rows": 10}).inputs[0].shape == (2, 13)

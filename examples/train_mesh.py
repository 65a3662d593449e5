"""Train MeshGraphNets on a real mesh: flow around a cylinder, a Delaunay triangulation, one compiled training step.

    python examples/train_mesh.py                     1,900 nodes, 15 message-passing steps, 300 training steps; on a
                                                      CPU 200, 2 and 60, which is a minute with compilation
    python examples/train_mesh.py --nodes 200 --message-steps 2 --steps 20

What is learnt is the potential flow past the cylinder from where each node lies: a target with a closed form, so that
the example needs no data. bf16 by autocast, fp32 weights.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from scipy.spatial import Delaunay
from torch import Tensor

from tilestream.apps.message_passing import EncodeProcessDecode
from tilestream.cli.progress import Progress

RADIUS = 0.15


def mesh(nodes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points, fp32 [n, 2], denser near the cylinder, and directed edges, int64 [2, m], both ways and by receiver."""
    draw = np.random.default_rng(seed)
    angle, out = draw.uniform(0, 2 * np.pi, nodes // 2), RADIUS + draw.exponential(0.1, nodes // 2)
    near = np.stack([out * np.cos(angle), out * np.sin(angle)], 1)
    points = np.concatenate([near, draw.uniform((-0.5, -0.5), (1.5, 0.5), (nodes - len(near), 2))])
    points = points[np.linalg.norm(points, axis=1) >= RADIUS]
    triangles = Delaunay(points).simplices
    pairs = np.concatenate([triangles[:, [a, b]] for a, b in ((0, 1), (1, 2), (2, 0))])
    edges = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    middle = points[edges].mean(1)
    edges = edges[np.linalg.norm(middle, axis=1) >= RADIUS]  # none across the cylinder
    edges = edges[np.argsort(edges[:, 1], kind="stable")]
    return torch.from_numpy(points).float(), torch.from_numpy(edges.T.copy())


def flow(points: Tensor) -> Tensor:
    """Velocity of the potential flow past the cylinder, fp32 [n, 2]."""
    z = torch.view_as_complex(points.contiguous())
    velocity = 1 - RADIUS**2 / z**2
    return torch.stack([velocity.real, -velocity.imag], 1)


def train(nodes: int, message_steps: int, steps: int, seed: int = 0) -> tuple[str, list[float]]:
    """What the mesh is, and the loss of every step."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points, (senders, receivers) = (x.to(device) for x in mesh(nodes, seed))
    on_wall = torch.linalg.vector_norm(points, dim=1, keepdim=True) < 1.2 * RADIUS
    apart = points[senders] - points[receivers]
    inputs = (
        torch.cat([points, on_wall.float()], 1),
        torch.cat([apart, torch.linalg.vector_norm(apart, dim=1, keepdim=True)], 1),
        senders,
        receivers,
    )
    target = flow(points)
    model = EncodeProcessDecode(node_features=3, edge_features=3, outs=2, steps=message_steps).to(device)
    fast = torch.compile(model, backend="tilestream")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    with Progress() as say:
        say(f"compiling: the first of {steps} training steps on {device}")
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = (fast(*inputs).float() - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if step % max(1, steps // 10) == 0:
                say(f"step {step + 1} of {steps}: loss {loss.item():.4f}")
    return f"{len(points):,} nodes, {len(senders):,} edges", torch.stack(losses).tolist()


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    nodes, message_steps, steps = (1900, 15, 300) if torch.cuda.is_available() else (200, 2, 60)
    wanted.add_argument("--nodes", type=int, default=nodes)
    wanted.add_argument("--message-steps", type=int, default=message_steps)
    wanted.add_argument("--steps", type=int, default=steps, help="training steps")
    given = wanted.parse_args()
    what, losses = train(given.nodes, given.message_steps, given.steps)
    print(f"{what}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {given.steps} steps")


if __name__ == "__main__":
    main()

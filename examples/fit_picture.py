"""Fit a neural field to a picture: a network of 2-D positions whose training step is compiled by tilestream.

    python examples/fit_picture.py                     astronaut.png before and after, on the GPU if there is one
    python examples/fit_picture.py --steps 50 --points 4096 --side 64

The field takes sines of the position through four layers of 128, in bf16 with fp32 weights
(autocast). On a machine without a Hopper GPU the same line runs by Inductor, and says so; on a CPU it fits a small
picture in fewer steps, which is a minute with compilation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tilestream.cli.progress import Progress


class Field(nn.Module):
    """Colour at a position: fp32 [n, 2] in [-1, 1] to [n, 3] in [0, 1]."""

    frequencies: Tensor

    def __init__(self, width: int = 128, octaves: int = 8) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.pi * 2.0 ** torch.arange(octaves))
        sizes = [4 * octaves, width, width, width, width]
        layers = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, at: Tensor) -> Tensor:
        phases = (at[..., None] * self.frequencies).flatten(-2)
        return torch.sigmoid(self.net(torch.cat([phases.sin(), phases.cos()], -1)).float())


def picture(side: int) -> Tensor:
    """fp32 [side, side, 3] in [0, 1]: scikit-image's astronaut, or rings where that is not installed."""
    try:
        from skimage import data  # pyright: ignore[reportMissingImports]
        from skimage.transform import resize  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(np.asarray(resize(data.astronaut(), (side, side)), dtype=np.float32))
    except ImportError:
        y, x = torch.meshgrid(*[torch.linspace(-1, 1, side)] * 2, indexing="ij")
        return torch.stack([(20 * (x * x + y * y) + phase).sin() / 2 + 0.5 for phase in (0, 2, 4)], -1)


def positions(side: int) -> Tensor:
    """fp32 [side * side, 2]: the middle of every pixel."""
    line = (torch.arange(side) + 0.5) / side * 2 - 1
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)


def fit(target: Tensor, steps: int, points: int, seed: int = 0) -> tuple[Tensor, list[float]]:
    """The fitted picture, [side, side, 3], and the loss of every tenth step."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    field = Field().to(device)
    optimizer = torch.optim.Adam(field.parameters(), lr=2e-3)
    at, colours = positions(target.shape[0]).to(device), target.reshape(-1, 3).to(device)

    @torch.compile(backend="tilestream")
    def loss_of(at: Tensor, colours: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return (field(at) - colours).square().mean()

    losses = []
    with Progress() as say:
        say(f"compiling: the first of {steps} training steps on {device}")
        for step in range(steps):
            some = torch.randint(len(at), (points,), device=device)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(at[some], colours[some])
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                losses.append(loss.item())
            if step % max(1, steps // 10) == 0:
                say(f"step {step + 1} of {steps}: loss {loss.item():.4f}")
    with torch.no_grad():
        return field(at).reshape(target.shape).cpu(), losses


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps, points, side = (2000, 65_536, 512) if torch.cuda.is_available() else (200, 4096, 96)
    wanted.add_argument("--steps", type=int, default=steps)
    wanted.add_argument("--points", type=int, default=points, help="positions a step")
    wanted.add_argument("--side", type=int, default=side, help="pixels")
    wanted.add_argument("--out", type=Path, default=Path("astronaut.png"))
    given = wanted.parse_args()
    target = picture(given.side)
    fitted, losses = fit(target, given.steps, given.points)
    from matplotlib.image import imsave

    imsave(given.out, torch.cat([target, fitted], 1).clamp(0, 1).numpy())
    noise = -10 * (fitted - target).square().mean().log10().item()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {noise:.1f} dB; the picture and its fit are in {given.out}")


if __name__ == "__main__":
    main()

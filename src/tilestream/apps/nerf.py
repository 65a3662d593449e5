"""NeRF's network and its rays: the sizes of ``yenchenlin/nerf-pytorch`` (Mildenhall et al. 2020, appendix A).

The scene is a camera on a circle around the origin; its rays give the points and directions that
the network is asked about, as in rendering. Nothing is read from disk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

POINT_BANDS = 10
VIEW_BANDS = 4


class PositionalEncoding(nn.Module):
    """``[x, sin(x), cos(x), sin(2x), cos(2x), ...]`` with ``bands`` octaves: [*, 3] to [*, 3 + 6 bands]."""

    def __init__(self, bands: int) -> None:
        super().__init__()
        self.bands = bands

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for band in range(self.bands):
            parts += [torch.sin(x * 2.0**band), torch.cos(x * 2.0**band)]
        return torch.cat(parts, -1)


class NeRF(nn.Module):
    """Colour and density of embedded points: ``([*, points], [*, views])`` to ``[*, 4]``.

    ``depth`` layers of ``width``, the embedded point joined again after layer ``skip``; a density
    head of 1; a feature layer of ``width``, the view joined to it, a layer of ``width / 2`` and a
    colour head of 3. The result is ``cat(colour, density)``, raw, as in the original.
    """

    def __init__(self, depth: int = 8, width: int = 256, points: int = 63, views: int = 27, skip: int = 4) -> None:
        super().__init__()
        self.skip = skip
        ins = [points] + [width + points if layer == skip else width for layer in range(depth - 1)]
        self.points = nn.ModuleList(nn.Linear(n, width) for n in ins)
        self.alpha = nn.Linear(width, 1)
        self.feature = nn.Linear(width, width)
        self.views = nn.Linear(width + views, width // 2)
        self.rgb = nn.Linear(width // 2, 3)

    def forward(self, points: Tensor, views: Tensor) -> Tensor:
        h = points
        for index, layer in enumerate(self.points):
            h = F.relu(layer(h))
            if index == self.skip:
                h = torch.cat([points, h], -1)
        alpha = self.alpha(h)
        h = torch.cat([self.feature(h), views], -1)
        h = F.relu(self.views(h))
        return torch.cat([self.rgb(h), alpha], -1)


def rays(
    height: int, width: int, angle: float = 0.6, elevation: float = 0.5, radius: float = 4.0
) -> tuple[Tensor, Tensor]:
    """A pinhole camera on a circle that looks at the origin; 50 degrees of view.

    Returns:
        origins and unit directions of the rays, each fp32 [height * width, 3].
    """
    eye = radius * torch.tensor(
        [math.cos(angle) * math.cos(elevation), math.sin(angle) * math.cos(elevation), math.sin(elevation)]
    )
    forward = -eye / eye.norm()
    right = torch.linalg.cross(forward, torch.tensor([0.0, 0.0, 1.0]))
    right = right / right.norm()
    up = torch.linalg.cross(right, forward)
    scale = math.tan(math.radians(25.0))
    y, x = torch.meshgrid(torch.linspace(scale, -scale, height), torch.linspace(-scale, scale, width), indexing="ij")
    directions = forward + x.reshape(-1, 1) * right + y.reshape(-1, 1) * up
    directions = directions / directions.norm(dim=-1, keepdim=True)
    return eye.expand_as(directions), directions


def scene(rows: int, samples: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``rows`` samples along the rays of a camera, as many pixels as that takes, embedded.

    Each ray is cut between 2 and 6 into ``samples`` bins with one random point in each (stratified
    sampling, as in NeRF). Coordinates are scaled to the unit cube.

    Returns:
        embedded points fp32 [rows, 63] and embedded view directions fp32 [rows, 27].
    """
    pixels = max(1, math.ceil(rows / samples))
    side = math.ceil(math.sqrt(pixels))
    origins, directions = rays(side, side)
    origins, directions = origins[:pixels], directions[:pixels]
    generator = torch.Generator().manual_seed(seed)
    depth = 2.0 + 4.0 * (torch.arange(samples) + torch.rand(pixels, samples, generator=generator)) / samples
    points = (origins[:, None] + depth[..., None] * directions[:, None]).reshape(-1, 3)[:rows] / 4.0
    views = directions[:, None].expand(-1, samples, -1).reshape(-1, 3)[:rows]
    return PositionalEncoding(POINT_BANDS)(points), PositionalEncoding(VIEW_BANDS)(views)

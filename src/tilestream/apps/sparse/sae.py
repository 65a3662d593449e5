"""The sparse autoencoder of FuseFlow: a pruned encoder and decoder over flattened images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilestream.apps.sparse.gcn import sparse_weight

SIZES = {"imagenet": (224 * 224, 256), "nih": (1024 * 1024, 512), "luna16": (512 * 512, 512)}
"""Data set to (pixels, hidden units), as released."""

BATCH = 32


class SAE(nn.Module):
    """``relu(X E + be) D + bd``: ``[batch, pixels]`` to ``[batch, pixels]``.

    Five operators, which are the five kernels of the released code: X E, be, relu, H D, bd. The paper prunes 50 % of
    the weights; the released script's default is 90 %.
    """

    def __init__(self, pixels: int, hidden: int, density: float = 0.5, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.encoder = nn.Parameter(sparse_weight(pixels, hidden, density, random))
        self.encoder_bias = nn.Parameter(torch.rand(hidden, generator=random, dtype=torch.float64))
        self.decoder = nn.Parameter(sparse_weight(hidden, pixels, density, random))
        self.decoder_bias = nn.Parameter(torch.rand(pixels, generator=random, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(torch.matmul(images, self.encoder) + self.encoder_bias)
        return torch.matmul(hidden, self.decoder) + self.decoder_bias

"""FuseFlow's models as users of PyTorch would write them without us: edges, CSR weights, FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tilestream.apps.sparse.gpt3 import bigbird_blocks


def summed(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """A sparse matrix times a dense one, an entry at a time."""
    return x.new_zeros(x.shape).index_add(0, rows, values[:, None] * x[columns])


def over_edges(module: nn.Module) -> Callable[..., Tensor]:
    """GCN or GraphSAGE of ``apps.sparse`` as a function of (rows, columns, values, x)."""
    m: Any = module

    def gcn(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
        hidden = torch.relu(summed(rows, columns, values, x) @ m.weight1 + m.bias1)
        return torch.softmax(summed(rows, columns, values, hidden) @ m.weight2 + m.bias2, dim=-1)

    def sage(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
        near = summed(rows, columns, values, x) @ m.weight_near1 + m.bias_near1
        hidden = torch.relu(x @ m.weight_self1 + m.bias_self1 + near)
        near = summed(rows, columns, values, hidden) @ m.weight_near2 + m.bias_near2
        return torch.relu(hidden @ m.weight_self2 + m.bias_self2 + near)

    return sage if hasattr(m, "weight_self1") else gcn


def autoencoded(module: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    """The autoencoder with its pruned weights as CSR matrices, on columns of pixels."""
    m: Any = module
    encoder, decoder = (w.detach().t().contiguous().to_sparse_csr() for w in (m.encoder, m.decoder))

    def run() -> Tensor:
        hidden = torch.relu(encoder @ images.t() + m.encoder_bias[:, None])
        return (decoder @ hidden + m.decoder_bias[:, None]).t()

    return run


class Flexible(nn.Module):
    """``GPT3`` with FlexAttention over the blocks of its mask, compiled a decoder at a time."""

    def __init__(self, model: nn.Module, sequence: int, block: int) -> None:
        super().__init__()
        self.model: Any = model
        device = next(model.parameters()).device
        kept = torch.from_numpy(bigbird_blocks(sequence, block)).to(device)

        def keeps(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return kept[row // block, column // block]

        self.mask = create_block_mask(keeps, None, None, sequence, sequence, device=str(device))
        self._decoder = torch.compile(self._one, dynamic=False)

    def _one(self, decoder: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (decoder.heads, -1)).transpose(0, 1)[None] for t in decoder.projections(x))
        made: Any = flex_attention(q, k, v, block_mask=self.mask)
        return decoder.rest(made[0].transpose(0, 1).flatten(1), x)

    def forward(self, x: Tensor) -> Tensor:
        for decoder in self.model.decoders:
            x = self._decoder(decoder, x)
        return F.layer_norm(x, x.shape[-1:], self.model.norm.weight, self.model.norm.bias)

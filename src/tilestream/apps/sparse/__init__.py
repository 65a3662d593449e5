"""The four sparse applications of FuseFlow, as plain PyTorch modules whose sizes are arguments."""

from tilestream.apps.sparse.gcn import GCN, GraphSAGE
from tilestream.apps.sparse.gpt3 import GPT3, Attention, Decoder, bigbird_mask
from tilestream.apps.sparse.sae import SAE

__all__ = ["GCN", "GPT3", "SAE", "Attention", "Decoder", "GraphSAGE", "bigbird_mask"]

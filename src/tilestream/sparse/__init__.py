"""Sparse PyTorch models as fused streaming dataflow graphs, run and timed token by token (FuseFlow)."""

"""Sparse programs on a GPU: statements over a sparse matrix as ragged pipelines, the others by PyTorch."""

"""Kernels that operators of ours run as, and the copies of weights before a pipeline's kernel: each is a header."""

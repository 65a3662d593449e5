"""Attention over the pairs of queries and keys that a mask keeps."""

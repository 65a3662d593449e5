"""Orders of indices: which there are, and which is taken by default."""

"""Rewrites of ATen graphs: ``table`` lists every one by name, in the order in which they run."""

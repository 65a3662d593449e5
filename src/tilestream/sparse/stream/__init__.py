"""Streams and the graphs of primitives that they join."""

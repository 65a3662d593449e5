"""Spatial pipelines of operators that stream to each other through the L2, from a captured graph (Kitsune)."""

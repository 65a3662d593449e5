"""Measurements, fits and tables: run from the root of the repository, as ``python -m benchmarks.run.training``."""

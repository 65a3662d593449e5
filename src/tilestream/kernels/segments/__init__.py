"""Ragged pipelines: for each node what its edges' values sum to, gathered, computed and combined in one kernel."""

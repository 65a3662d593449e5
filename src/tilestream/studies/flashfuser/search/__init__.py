"""Searches for how a chain of products runs: FlashFuser's over schedules, and ours over kernels that share a tile."""

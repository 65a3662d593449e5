"""Searches for how a chain of products runs: FlashFuser's over schedules, and the compiler's over its kernels."""

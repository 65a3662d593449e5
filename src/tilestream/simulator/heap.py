"""A binary heap of events on arrays: (time, order of entry, code), smallest first. Compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def push(times: np.ndarray, keys: np.ndarray, codes: np.ndarray, count: int, time: float, key: int, code: int) -> int:
    """Add an event to the first ``count`` entries; ``key`` breaks ties. Gives the new count."""
    i = count
    while i > 0:
        up = (i - 1) >> 1
        if times[up] < time or (times[up] == time and keys[up] < key):
            break
        times[i], keys[i], codes[i] = times[up], keys[up], codes[up]
        i = up
    times[i], keys[i], codes[i] = time, key, code
    return count + 1


@njit(cache=True)
def pop(times: np.ndarray, keys: np.ndarray, codes: np.ndarray, count: int) -> int:
    """Take the first event out: it moves behind the others, to entry ``count - 1``, which is the new count."""
    first_time, first_key, first_code = times[0], keys[0], codes[0]
    last = count - 1
    time, key, code = times[last], keys[last], codes[last]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= last:
            break
        if down + 1 < last and (
            times[down + 1] < times[down] or (times[down + 1] == times[down] and keys[down + 1] < keys[down])
        ):
            down += 1
        if time < times[down] or (time == times[down] and key < keys[down]):
            break
        times[i], keys[i], codes[i] = times[down], keys[down], codes[down]
        i = down
    times[i], keys[i], codes[i] = time, key, code
    times[last], keys[last], codes[last] = first_time, first_key, first_code
    return last

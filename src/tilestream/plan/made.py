"""What the passes of recipes made of a program: each once, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

from tilestream.devices import Device
from tilestream.errors import IRError, VerifyError
from tilestream.ir.pipeline import Pipeline

Made = dict[Hashable, Pipeline | VerifyError | IRError]


@lru_cache(maxsize=64)
def made_of(_program: Pipeline, _device: Device) -> Made:
    """What recipes make of a program on a device, or why they cannot; filled by ``once``. Rows are no part of it: a
    model's equal layers are planned at as many numbers of rows as it has kinds of edges and nodes."""
    return {}


def once(made: Made, key: Hashable, make: Callable[[], Pipeline]) -> Pipeline:
    """``make``'s pipeline; it is called once for a key, and why it raised is kept too."""
    if key not in made:
        try:
            made[key] = make()
        except (VerifyError, IRError) as error:
            made[key] = error.with_traceback(None)
    found = made[key]
    if not isinstance(found, Pipeline):
        # A new one: an error that is kept and raised keeps every frame above it, with all that a caller holds there.
        raise type(found)(found.cause, found.remedy)
    return found

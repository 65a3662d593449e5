"""The last pass of every recipe, and what runs passes one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.fits import verify_on

Pass = Callable[[Pipeline], Pipeline]


def apply(passes: Sequence[Pass], program: Pipeline) -> Pipeline:
    """The passes one after another."""
    for one in passes:
        program = one(program)
    return program


def verified(p: Pipeline, device: Device) -> Pipeline:
    """``p`` itself, if it is legal on ``device``; raises ``VerifyError`` otherwise."""
    verify_on(p, device)
    return p

"""Where a command runs a model, with how many of its rows, and which models it cannot judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilestream.errors import CaptureError, DeviceError

if TYPE_CHECKING:
    from tilestream.apps.load import Workload

REFERENCE_ROWS = 1024


def where(target: str) -> str:
    """Where a model is run for ``target``: ``cuda`` or ``cpu``.

    Raises:
        DeviceError: kernels are asked for and there is no GPU.
    """
    import torch

    if target == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--target cuda was given, and torch sees no GPU", "use --target reference, or leave it out")
    return "cuda" if torch.cuda.is_available() and target != "reference" else "cpu"


def planned_rows(model: str, rows: int | None) -> int | None:
    """The rows asked for, else a named model's own; None where the function of a file decides."""
    from tilestream.apps import APPS

    return APPS[model].rows if rows is None and model in APPS else rows


def planned(model: str, rows: int | None, dtype: str | None, ran: int | None) -> Workload | None:
    """A named model with the rows to plan for, in shapes alone; None where those are the rows that run."""
    from tilestream.apps.load import load

    wanted = planned_rows(model, rows)
    return None if wanted == ran else load(model, wanted, dtype, fake=True)


def rows_to_run(model: str, rows: int | None, on: str) -> int | None:
    """The reference machine runs few rows of a named model unless told how many."""
    own = planned_rows(model, rows)
    return min(own, REFERENCE_ROWS) if own is not None and on == "cpu" and rows is None else rows


def refuse_random(workload: Workload) -> None:
    """Results that change from call to call say nothing about who computes them.

    Raises:
        CaptureError: a module drops at random.
    """
    from tilestream.plan.hints import changing_in_training

    dropping = [name for name in changing_in_training(workload.module) if "Dropout" in name]
    if dropping:
        raise CaptureError(
            f"{workload.name} is in train mode, and its {dropping[0]} drops at random", "return module.eval()"
        )

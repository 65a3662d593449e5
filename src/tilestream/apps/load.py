"""From what the user typed (``nerf`` or ``my.py:make``) to a module and its inputs."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilestream.apps import APPS
from tilestream.apps.models import MODELS
from tilestream.dtypes import TORCH_DTYPES
from tilestream.errors import CaptureError, OptionError

REMEDY = "write a function that returns (module, inputs): a torch.nn.Module and a tuple of tensors"


@dataclass(frozen=True)
class Workload:
    """A module in evaluation mode with its inputs, on one device.

    ``rows`` is the number of rows of the first input: the product of all but its last dimension.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return self.inputs[0].numel() // max(1, self.inputs[0].shape[-1]) if self.inputs[0].dim() else 1

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters()), self.inputs[0].dtype)


def load(target: str, rows: int | None = None, dtype: str | None = None, device: str = "cpu") -> Workload:
    """The workload called ``target``: the name of an app, or ``FILE.py:FUNCTION``.

    Args:
        rows: for an app, how many rows (its usual number by default). For a file, passed to the
            function, which must have a parameter of that name.
        dtype: ``bf16``, ``f16`` or ``f32``. Apps default to bf16, a file's model is left as it is.
        device: ``cpu`` or ``cuda``.

    Raises:
        OptionError: rows or dtype is out of range, or the function takes no ``rows``.
        CaptureError: no such app, file or function, or the function did not return (module, inputs).
    """
    if rows is not None and rows < 0:
        raise OptionError(f"--rows is {rows}", "give a number of rows from 0 up")
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise OptionError(f"--dtype is {dtype!r}", f"use one of {', '.join(TORCH_DTYPES)}")
    if ":" not in target and not target.endswith(".py"):
        app = APPS.get(target)
        if app is None and target in MODELS:
            raise CaptureError(
                f"{target!r} is a whole model, which this does not run",
                "simulate it with `tilestream simulate`, or build it with tilestream.apps.models",
            )
        if app is None:
            near = difflib.get_close_matches(target, APPS, 1)
            hint = f"did you mean {near[0]!r}? The models are" if near else "the models are"
            raise CaptureError(
                f"there is no model called {target!r}", f"{hint} {', '.join(APPS)}; or give FILE.py:FUNCTION"
            )
        module, inputs = app.make(rows, TORCH_DTYPES[dtype or "bf16"], device)
        return Workload(target, module, inputs)
    module, inputs = _checked(target, _call(target, _function(target), rows))
    module = module.eval()
    if dtype is not None:
        module = module.to(TORCH_DTYPES[dtype])
        inputs = tuple(x.to(TORCH_DTYPES[dtype]) if x.is_floating_point() else x for x in inputs)
    return Workload(target, module.to(device), tuple(x.to(device) for x in inputs))


def _function(target: str) -> Callable[..., Any]:
    file, _, function = target.rpartition(":")
    path = Path(file)
    if not file or not function or path.suffix != ".py":
        raise CaptureError(f"{target!r} does not name a function in a file", "write it as FILE.py:FUNCTION")
    if not path.is_file():
        raise CaptureError(f"there is no file {str(path)!r}", "check the path; it is taken from the current folder")
    name = f"tilestream_file_{path.stem}"  # a name of its own: a user's random.py must not replace the library's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look their module up here
    sys.path.insert(0, str(path.parent.resolve()))  # the file's neighbours, as under `python FILE.py`
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CaptureError(
            f"{path} could not be imported: {_short(error)}", "run the file with python and mend it"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise CaptureError(
            f"{path} has no function {function!r}", f"it has: {', '.join(names) or 'none'}. If none fits, {REMEDY}"
        )
    return found


def _call(target: str, function: Callable[..., Any], rows: int | None) -> Any:
    keywords = {}
    if rows is not None:
        if "rows" not in inspect.signature(function).parameters:
            raise OptionError(
                f"--rows was given, and {target} takes no argument called rows", "add rows to its parameters"
            )
        keywords["rows"] = rows
    try:
        return function(**keywords)
    except Exception as error:
        raise CaptureError(f"{target} raised {_short(error)}", REMEDY) from error


def _checked(target: str, made: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if not isinstance(made, Sequence) or len(made) != 2:
        raise CaptureError(f"{target} returned {type(made).__name__}", REMEDY)
    module, inputs = made
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(module, nn.Module):
        raise CaptureError(f"{target} returned {type(module).__name__} in the place of the module", REMEDY)
    if not isinstance(inputs, Sequence) or not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise CaptureError(f"{target} returned inputs that are not tensors", REMEDY)
    return module, tuple(inputs)


def _short(error: Exception) -> str:
    """One line of an exception of the user's code."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__

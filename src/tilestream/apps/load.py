"""From what the user typed (``nerf`` or ``my.py:make``) to a module and its inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tilestream.apps import APPS
from tilestream.apps.models import MODELS
from tilestream.errors import CaptureError, OptionError, TilestreamError
from tilestream.ir.dtypes import TORCH_DTYPES

REMEDY = (
    "write a function that returns (module, inputs): a torch.nn.Module, and a tuple of what it is called with, "
    "a dict of keywords, or (tuple, dict)"
)


@dataclass(frozen=True)
class Workload:
    """A module, in the mode it was made in, and what it is called with: ``module(*inputs, **keywords)``, on one device.

    Inputs may be nested, and have leaves that are no tensors.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the inputs, in order."""
        return [x for x in tree_leaves((self.inputs, dict(self.keywords))) if isinstance(x, Tensor)]

    @property
    def rows(self) -> int:
        """Rows of the first tensor: the product of all but its last dimension; of images [n, c, h, w], their number."""
        shape = self.tensors[0].shape
        return int(shape[0] if len(shape) > 3 else prod(shape[:-1]))

    @property
    def shapes(self) -> str:
        """Shapes of the tensors, for people: ``64x3, 64x128``."""
        return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters()), self.tensors[0].dtype)


def load(
    target: str,
    rows: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    fake: bool = False,
    sizes: Mapping[str, int] | None = None,
    training: bool = False,
) -> Workload:
    """The workload called ``target``: the name of an app or of a whole model, or ``FILE.py:FUNCTION``.

    Args:
        rows: for an app, how many rows (its usual number by default). For a file, passed to the
            function, which must have a parameter of that name.
        dtype: ``bf16``, ``f16`` or ``f32``. Apps default to bf16, a file's model is left as it is.
        device: ``cpu`` or ``cuda``.
        sizes: of a whole model (``apps.models``), what differs from its published ones.
        training: parameters of a named model take gradients.
        fake: make tensors that have shapes and no memory, to capture and not to run. A file's function that cannot do
            with those is called again for real ones.

    Raises:
        OptionError: rows or dtype is out of range, or the function takes no ``rows``.
        CaptureError: no such app, file or function, or the function did not return (module, inputs).
    """
    if rows is not None and rows < 0:
        raise OptionError(f"--rows is {rows}", "give a number of rows from 0 up")
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise OptionError(f"--dtype is {dtype!r}", f"use one of {', '.join(TORCH_DTYPES)}")
    if ":" not in target and not target.endswith(".py"):
        if not fake and target in MODELS and (sizes or target not in APPS):
            with _fakes():
                like = _named(target, rows, TORCH_DTYPES[dtype or "bf16"], "cpu", dict(sizes or {}), training)
            _check_room(target, *like, device)
        with _fakes() if fake else contextlib.nullcontext():
            module, inputs = _named(target, rows, TORCH_DTYPES[dtype or "bf16"], device, dict(sizes or {}), training)
        return Workload(target, module, inputs)
    if sizes:
        raise OptionError(f"{target} has no size called {min(sizes)!r}", "a file takes --rows only")
    function = _function(target)
    if fake:
        with contextlib.suppress(_NoFakesError):
            return _from_function(target, function, rows, dtype, device, fake)
    return _from_function(target, function, rows, dtype, device)


def _check_room(target: str, module: nn.Module, inputs: Sequence[Any], device: str) -> None:
    """Raise ``CaptureError`` where the model alone takes more memory than is free: to run out of it ends processes."""
    tensors = [*module.parameters(), *module.buffers(), *(x for x in inputs if isinstance(x, Tensor))]
    wanted = sum(x.numel() * x.element_size() for x in tensors)
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else _free_bytes()
    if free is not None and wanted > free:
        raise CaptureError(
            f"{target!r} takes {wanted / 1e9:.1f} GB at its published sizes, and {free / 1e9:.1f} GB are free",
            "explain or simulate it, which takes no memory, or give it smaller sizes",
        )


def _free_bytes() -> int | None:
    """Memory that this machine has left; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else 1024 * int(found.split()[1])


def _named(
    name: str, rows: int | None, dtype: torch.dtype, device: str, sizes: dict[str, int], training: bool
) -> tuple[nn.Module, tuple[Any, ...]]:
    """An app by its rows, a whole model by its sizes; what is both, by whichever is given."""
    if name in MODELS and (sizes or name not in APPS):
        model = MODELS[name]
        changes: dict[str, Any] = {**sizes, **({} if rows is None else {"rows": rows})}
        kinds = {f.name: f.type for f in dataclasses.fields(model.sizes)}
        changes = {n: bool(v) if kinds.get(n) in ("bool", bool) else v for n, v in changes.items()}
        model.resolved(**changes)  # refuses names of make's own arguments, such as dtype
        return model.make(training=training, device=device, dtype=dtype, **changes)
    app = APPS.get(name)
    if app is None:
        names = {**APPS, **MODELS}
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}? The models are" if near else "the models are"
        raise CaptureError(f"there is no model called {name!r}", f"{hint} {', '.join(names)}; or give FILE.py:FUNCTION")
    if sizes:
        raise OptionError(f"{name} has no size called {min(sizes)!r}", "it takes --rows only")
    module, inputs = app.make(rows, dtype, device)
    if training:
        module.requires_grad_().train()
    return module, inputs


class _NoFakesError(Exception):
    """A function failed with fake tensors, and may not with real ones."""


@contextlib.contextmanager
def _fakes() -> Iterator[None]:
    """Fake tensors, and modules that can be converted: torch swaps parameters in place, which fake ones refuse.

    Nothing can be saved: a file of fake tensors would look like one of real ones.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(function(p.detach()), p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = function(b)
        return module

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        warnings.catch_warnings(),
        mock.patch.object(nn.Module, "_apply", convert),
        mock.patch.object(torch, "save", side_effect=_NoFakesError("fake tensors have nothing to save")),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch's own copy of a module
        yield


def _from_function(
    target: str, function: Callable[..., Any], rows: int | None, dtype: str | None, device: str, fake: bool = False
) -> Workload:
    def ready(x: Tensor) -> Tensor:
        return x.to(device, TORCH_DTYPES[dtype] if dtype is not None and x.is_floating_point() else x.dtype)

    with _fakes() if fake else contextlib.nullcontext():
        module, inputs, keywords = _checked(target, _call(target, function, rows, fake))
        module = module.to(device) if dtype is None else module.to(device, TORCH_DTYPES[dtype])
        inputs, keywords = tree_map_only(Tensor, ready, (inputs, keywords))
    return Workload(target, module, inputs, keywords)


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
    # The file's neighbours, but behind all else: a random.py among them must not replace the library's in a worker.
    sys.path.append(str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that leaves would decide our exit code
        raise CaptureError(
            f"{path} could not be imported: {_short(error, path)}", "run the file with python and mend it"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise CaptureError(
            f"{path} has no function {function!r}", f"it has: {', '.join(names) or 'none'}. If none fits, {REMEDY}"
        )
    return found


def _call(target: str, function: Callable[..., Any], rows: int | None, fake: bool) -> Any:
    keywords = {}
    if rows is not None:
        if "rows" not in inspect.signature(function).parameters:
            raise OptionError(
                f"--rows was given, and {target} takes no argument called rows", "add rows to its parameters"
            )
        keywords["rows"] = rows
    try:
        return function(**keywords)
    except TilestreamError:
        raise
    except (Exception, SystemExit) as error:
        if fake:
            raise _NoFakesError from error
        raise CaptureError(
            f"{target} raised {_short(error, Path(target.rpartition(':')[0]))}", "mend it; --debug shows the traceback"
        ) from error


def _checked(target: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, Sequence) or len(made) != 2:
        raise CaptureError(f"{target} returned {type(made).__name__}", REMEDY)
    module, given = made
    if not isinstance(module, nn.Module):
        raise CaptureError(f"{target} returned {type(module).__name__} in the place of the module", REMEDY)
    inputs, keywords = _split(given)
    if inputs is None or not all(isinstance(name, str) for name in keywords):
        raise CaptureError(f"{target} returned {type(given).__name__} in the place of the inputs", REMEDY)
    if not any(isinstance(x, Tensor) for x in tree_leaves((inputs, keywords))):
        raise CaptureError(f"{target} returned inputs without a tensor", REMEDY)
    return module, inputs, keywords


def _split(given: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """What stands in the place of the inputs, as positional arguments and keywords."""
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if not isinstance(given, tuple | list):
        return None, {}
    if len(given) == 2 and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def _short(error: BaseException, path: Path) -> str:
    """One line of an exception of the user's code, with the last line of the file ``path`` that led to it."""
    text = str(error).strip().splitlines()
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    where = f" at {path.name}:{own[-1].lineno}" if own else ""
    return (f"{type(error).__name__}: {text[0]}" if text else type(error).__name__) + where

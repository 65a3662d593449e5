"""From what the user typed, or a row of Table 2, to the graph of operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilestream.apps.load import Workload, load
from tilestream.apps.models import Model, find
from tilestream.errors import OptionError
from tilestream.studies.kitsune.capture import capture
from tilestream.studies.kitsune.compiler.operators import Mode, OperatorGraph

TABLE2_MODELS = {"graphcast": "graphcast_cut"}
"""Rows of Table 2 whose model has another name than the row's application."""


def is_file(model: str) -> bool:
    """Whether ``model`` is ``FILE.py:FUNCTION`` and no name."""
    return ":" in model or model.endswith(".py")


def graph_of(model: str, mode: str, sizes: Mapping[str, int] | None = None) -> OperatorGraph:
    """The operators of a whole model: a name of ``apps.models.MODELS`` with its sizes, or ``FILE.py:FUNCTION``.

    Raises:
        OptionError: no such model or size; a file takes ``rows`` only.
        CaptureError: the model cannot be captured.
    """
    given = dict(sizes or {})
    if not is_file(model):
        known = find(model)
        changes = _typed(known, given)
        known.resolved(**changes)  # refuses names of make's own arguments, such as dtype
        module, inputs = known.make(training=mode == "training", **changes)
        return dataclasses.replace(capture(module, inputs, _mode(mode)), name=model)
    if set(given) - {"rows"}:
        raise OptionError(f"{model} has no size called {min(set(given) - {'rows'})!r}", "a file takes rows only")
    workload = load(model, given.get("rows"))
    module = workload.module.train(mode == "training").requires_grad_(mode == "training")
    return dataclasses.replace(capture(module, workload.inputs, _mode(mode)), name=model)


def workload_of(model: str, mode: str, sizes: Mapping[str, int] | None = None, fake: bool = True) -> Workload:
    """The same model as ``graph_of`` takes, as ``simulate --size NAME=VALUE`` plans it.

    Args:
        fake: of tensors that have shapes and no memory.

    Raises:
        OptionError, CaptureError: as ``graph_of``.
    """
    given = dict(sizes or {})
    training = _mode(mode) == "training"
    if is_file(model):
        if set(given) - {"rows"}:
            raise OptionError(f"{model} has no size called {min(set(given) - {'rows'})!r}", "a file takes rows only")
        return load(model, given.get("rows"), fake=fake, training=training)
    known = find(model)
    resolved = known.resolved(**_typed(known, given))
    # A size that is named, so that a name of two models is the whole one, as here.
    named = given or {f.name: getattr(resolved, f.name) for f in dataclasses.fields(resolved)[:1]}
    return load(model, fake=fake, sizes=named, training=training)


def _typed(model: Model, given: Mapping[str, int]) -> dict[str, Any]:
    """Switches are given as numbers on a command line."""
    kinds = {f.name: f.type for f in dataclasses.fields(model.sizes)}
    return {name: bool(value) if kinds.get(name) in ("bool", bool) else value for name, value in given.items()}


def _mode(given: str) -> Mode:
    if given == "inference" or given == "training":
        return given
    raise OptionError(f"unknown mode {given!r}", "use one of: inference, training")


def table2_graph(app: str, mode: str, **sizes: Any) -> OperatorGraph:
    """The part of a model, and its batch, that a row of Table 2 is held against; ``sizes`` are changed."""
    model = find(TABLE2_MODELS.get(app, app))
    module, inputs = model.make(training=mode == "training", cut=True, **sizes)
    return dataclasses.replace(capture(module, inputs, _mode(mode)), name=app)

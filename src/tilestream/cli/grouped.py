"""Commands that share options: a parameter of a dataclass type stands for one option a field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer sees it: fields of dataclass parameters in their place, which come back as one object.

    Options of one meaning are then written down once, and what belongs together is handed on together.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    seen: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            seen.append(parameter.replace(annotation=kind))
            continue
        groups[parameter.name] = kind
        of_fields = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            seen.append(parameter.replace(name=field.name, annotation=of_fields[field.name], default=default))

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        return command(**given)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    run.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
    return run

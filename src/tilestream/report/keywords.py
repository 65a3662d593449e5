"""Keyword arguments that may be options of tilestream or arguments of the user's model: which is which."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tilestream.errors import OptionError
from tilestream.options import Options, parse


def split(
    model: Callable[..., Any],
    named: Mapping[str, Any],
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    own: tuple[str, ...] = (),
) -> tuple[Options, dict[str, Any]]:
    """Options, and the model's keyword arguments.

    A name in ``named`` is an option where only ``Options`` has it, and the model's where only the model has it. A model
    that takes any keyword (``**kwargs``) gets all that are no options.

    Args:
        named: what was given by keyword.
        options: options given as such; nothing of these goes to the model.
        kwargs: keywords of the model given as such.
        own: further names that mean something to the caller.

    Raises:
        OptionError: a name belongs to both, to neither, or is given twice; or an option's value is wrong.
    """
    parameters = _parameters(model)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    theirs = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = {f.name for f in fields(Options)}
    given = dict(vars(options)) if isinstance(options, Options) else dict(options or {})
    to_model = dict(kwargs or {})
    for name, value in named.items():
        if name in known | set(own) and name in theirs:
            raise OptionError(
                f"{name!r} is an option of tilestream and an argument of {_name(model)}",
                f"write options={{{name!r}: ...}} for the option, or kwargs={{{name!r}: ...}} for the model",
            )
        if name in own:
            continue
        into = given if name in known else to_model
        if into is to_model and name not in theirs and not anything:
            near = difflib.get_close_matches(name, [*sorted(known), *sorted(theirs)], 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(sorted(known))}"
            raise OptionError(f"{name!r} is neither an option nor an argument of {_name(model)}", remedy)
        if name in into:
            raise OptionError(f"{name!r} is given twice", "give it once")
        into[name] = value
    return parse(given), to_model


def _parameters(model: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a module's ``forward``, or of a function; empty where Python cannot tell."""
    try:
        return inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):
        return {}


def _name(model: Callable[..., Any]) -> str:
    return f"{type(model).__name__}.forward" if hasattr(model, "forward") else getattr(model, "__name__", "the model")

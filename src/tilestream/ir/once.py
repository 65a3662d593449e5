"""What is derived from an object that never changes, kept with it: passes ask for the same again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")


def once(function: Callable[[P], T]) -> Callable[[P], T]:
    """``function``, of a frozen dataclass, computed once for each object; an exception is raised anew each time.

    It is kept in the object's ``__dict__``, as ``cached_property`` does: equal objects, which may differ in the lines
    of the user's that they come from, have each their own, and nothing is hashed.
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def found(of: P) -> T:
        kept = of.__dict__
        if key not in kept:
            kept[key] = function(of)
        return kept[key]

    found.key = key  # pyright: ignore[reportAttributeAccessIssue]
    return found


def hand_on(fact: Callable[[P], object], of: P, to: P) -> P:
    """``to``, of which a fact of ``once`` is what it is of ``of``: it was made of it, and nothing is found again."""
    to.__dict__[fact.key] = fact(of)  # pyright: ignore[reportFunctionMemberAccess]
    return to


def hashed_once(cls: type[P]) -> type[P]:
    """A frozen dataclass whose hash is computed once for each object: caches ask for it on every call.

    Neither it nor what ``once`` keeps goes with a pickled object: strings hash otherwise in another process.
    """
    whole = cls.__hash__

    def hashed(self: P) -> int:
        kept = self.__dict__
        if _HASH not in kept:
            kept[_HASH] = whole(self)
        return kept[_HASH]

    def state(self: P) -> dict[str, object]:
        return {name: self.__dict__[name] for name in cls.__dataclass_fields__}  # pyright: ignore

    cls.__hash__, cls.__getstate__ = hashed, state  # pyright: ignore[reportAttributeAccessIssue]
    return cls


_HASH = "hash, once"

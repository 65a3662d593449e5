"""Threads that ask torch for the back end ``tilestream`` for the first time, at the same time."""

from __future__ import annotations

from typing import Any


class Backends(dict[str, Any]):
    """torch's table of back ends by name, in which ``tilestream`` may be registered more than once.

    torch looks a name up, loads what it stands for, and registers that, without a lock: while one thread loads this
    package, others find the name missing too, and all but the first then fail with ``duplicate name``. Loading gives
    each of them the same function, so that to register it again changes nothing; a table that never says that it has
    the name lets them.
    """

    def __contains__(self, name: object) -> bool:
        return name != "tilestream" and super().__contains__(name)


def share() -> None:
    """Put such a table in the place of torch's; without one of the kind known, all stays as it is."""
    from torch._dynamo.backends import registry

    found = getattr(registry, "_COMPILER_FNS", None)
    if isinstance(found, dict) and not isinstance(found, Backends):
        registry._COMPILER_FNS = Backends(found)

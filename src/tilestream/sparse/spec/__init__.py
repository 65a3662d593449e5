"""What every kind of node means, token by token, with its local clock: the readable specification and the oracle."""

from __future__ import annotations

from collections.abc import Callable

from tilestream.sparse.spec.clock import Channel, Clock, Steps, Token
from tilestream.sparse.spec.compute import alu, reduce, spacc
from tilestream.sparse.spec.joiners import intersect, union
from tilestream.sparse.spec.levels import array, locate, root, scan
from tilestream.sparse.spec.parallel import broadcast, fork, join
from tilestream.sparse.spec.repeats import crd_drop, crd_hold, repeat, repsig, val_drop
from tilestream.sparse.spec.writers import write_crd, write_val

MEANING: dict[str, Callable[[Clock], Steps]] = {
    "root": root,
    "scan": scan,
    "repsig": repsig,
    "repeat": repeat,
    "intersect": intersect,
    "union": union,
    "locate": locate,
    "array": array,
    "alu": alu,
    "reduce": reduce,
    "spacc": spacc,
    "crd_drop": crd_drop,
    "crd_hold": crd_hold,
    "val_drop": val_drop,
    "fork": fork,
    "join": join,
    "broadcast": broadcast,
    "write_crd": write_crd,
    "write_val": write_val,
}
"""By the kinds of ``stream.graph.NODES``."""

__all__ = ["MEANING", "Channel", "Clock", "Token"]

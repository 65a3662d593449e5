"""Nodes that line up streams of neighbouring levels: repeat, and dropping and holding coordinates."""

from __future__ import annotations

import numpy as np

from tilestream.sparse.spec.clock import Clock, Steps
from tilestream.sparse.stream.tokens import DONE, EMPTY, is_stop, stop, stop_level

REPEAT = 0
"""Tag of a repeat signal that says: once more. Any stop says: next; ``DONE`` ends."""


def repsig(node: Clock) -> Steps:
    """R for an element or N, S for a stop of any level."""
    while True:
        token = yield from node.take("in")
        signal = DONE if token.tag == DONE else stop(0) if is_stop(token.tag) else REPEAT
        yield from node.put(("sig", signal, 0.0))
        if signal == DONE:
            return
        node.step()


def repeat(node: Clock) -> Steps:
    """The element in hand at each R. At S it goes, and its fiber ends: S0, or S(n+1) where Sn follows it.

    An S that meets a bare Sn belongs to an outer fiber that is empty: S(n+1).
    """
    while True:
        token = yield from node.look("in")
        signal = yield from node.take("sig")
        if signal.tag == REPEAT:
            if token.tag < EMPTY:
                raise node.mismatch(token, signal)
            yield from node.put(("out", token.tag, token.value))
        elif signal.tag == DONE:
            if token.tag != DONE:
                raise node.mismatch(token, signal)
            yield from node.take("in")
            yield from node.put(("out", DONE, token.value))
            return
        else:
            if token.tag == DONE:
                raise node.mismatch(token, signal)
            yield from node.take("in")
            end = token.tag
            if not is_stop(end):
                end = (yield from node.look("in")).tag
                if is_stop(end):
                    yield from node.take("in")
            yield from node.put(("out", stop(stop_level(end) + 1) if is_stop(end) else stop(0), token.value))
        node.step()


def crd_hold(node: Clock) -> Steps:
    """The outer coordinate once for each inner one, in the structure of the inner stream."""
    while True:
        outer = yield from node.look("outer")
        inner = yield from node.take("inner")
        if inner.tag == DONE or outer.tag == DONE:
            if inner.tag != outer.tag:
                raise node.mismatch(outer, inner)
            yield from node.take("outer")
            yield from node.put(("outer", DONE, 0.0))
            return
        if not is_stop(inner.tag):
            if is_stop(outer.tag):
                raise node.mismatch(outer, inner)
            yield from node.put(("outer", outer.tag, 0.0))
        else:
            yield from node.take("outer")
            if not is_stop(outer.tag) and stop_level(inner.tag) > 0:
                outer = yield from node.take("outer")
                if not is_stop(outer.tag):
                    raise node.mismatch(outer, inner)
            yield from node.put(("outer", inner.tag, 0.0))
        node.step()


def val_drop(node: Clock) -> Steps:
    """Coordinates whose value is not 0, and those values. N is 0. Fibers that lose all they have stay, empty."""
    while True:
        crd = yield from node.look("crd")
        val = yield from node.look("val")
        yield from node.take("crd")
        yield from node.take("val")
        if crd.tag >= 0 and val.tag >= EMPTY:
            if val.tag >= 0 and np.any(val.value != 0):
                yield from node.put(("crd", crd.tag, 0.0), ("val", 0, val.value))
        elif crd.tag != val.tag or crd.tag == EMPTY:
            raise node.mismatch(crd, val)
        else:
            yield from node.put(("crd", crd.tag, 0.0), ("val", crd.tag, val.value))
        if crd.tag == DONE:
            return
        node.step()


def crd_drop(node: Clock) -> Steps:
    """Outer coordinates whose inner fiber holds something; the empty fibers go from the inner stream too.

    Only outer tokens cost a cycle. The end of a fiber is held back until it is known whether the outer fiber goes
    on: if all that follows in it is dropped, the ends become one stop.
    """
    held = False  # an inner fiber has been put out, but not its end
    while True:
        outer = yield from node.take("outer")
        if outer.tag == DONE:
            inner = yield from node.take("inner")
            if inner.tag != DONE:
                raise node.mismatch(outer, inner)
            yield from node.put(("outer", DONE, 0.0), ("inner", DONE, inner.value))
            return
        if is_stop(outer.tag):
            inner = yield from node.take("inner")
            if inner.tag != stop(stop_level(outer.tag) + 1):
                raise node.mismatch(outer, inner)
            yield from node.put(("outer", outer.tag, 0.0), ("inner", inner.tag, inner.value))
            held = False
            node.step()
            continue
        kept = False
        while True:
            inner = yield from node.look("inner")
            if inner.tag == DONE:
                raise node.mismatch(outer, inner)
            if is_stop(inner.tag):
                break
            yield from node.take("inner")
            if not kept:
                if held:
                    yield from node.put(("inner", stop(0), 0.0))
                yield from node.put(("outer", outer.tag, 0.0))
                kept = held = True
            yield from node.put(("inner", inner.tag, inner.value))
        if inner.tag == stop(0):
            yield from node.take("inner")  # a higher stop stays for the outer stop that goes with it
        node.step()

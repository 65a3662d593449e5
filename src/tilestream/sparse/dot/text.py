"""The part of the DOT language that stream graphs are written in: nodes, edges and attributes of one digraph."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tilestream.errors import SparseError

_WORDS = re.compile(
    r"""(?P<comment>\#[^\n]*|//[^\n]*|/\*.*?\*/)
      | "(?P<string>(?:[^"\\]|\\.)*)"
      | (?P<word>->|[\[\]{}=,;]|[A-Za-z_0-9.+-]+)
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass
class DotText:
    """``attrs`` of the graph, ``nodes`` by identifier in the order of the file, ``edges`` (from, to, attributes)."""

    attrs: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


def quote(text: object) -> str:
    """A DOT string."""
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse(text: str) -> DotText:
    """Read one digraph.

    Raises:
        SparseError: what is not understood, and the line it is in.
    """
    words = _words(text)
    found, at = DotText(), 0

    def peek(offset: int = 0) -> str:
        return words[at + offset][0] if at + offset < len(words) else ""

    def fail(expected: str) -> SparseError:
        line = words[at][1] if at < len(words) else text.count("\n") + 1
        return SparseError(f"line {line} of the DOT text has {peek() or 'its end'!r}", f"write {expected} there")

    def attributes() -> dict[str, str]:
        nonlocal at
        attrs: dict[str, str] = {}
        while peek() == "[":
            at += 1
            while peek() != "]":
                if peek(1) != "=":
                    raise fail("name=value, or ]")
                attrs[peek()] = peek(2)
                at += 3
                at += peek() in (",", ";")
            at += 1
        return attrs

    if peek() != "digraph":
        raise fail("digraph")
    at += 1
    at += peek() != "{"
    if peek() != "{":
        raise fail("{")
    at += 1
    while peek() != "}":
        if not peek():
            raise fail("}")
        name = peek()
        at += 1
        if name == ";":
            continue
        if peek() == "=":
            found.attrs[name] = peek(1)
            at += 2
        elif peek() == "->":
            ends = [name]
            while peek() == "->":
                ends.append(peek(1))
                at += 2
            attrs = attributes()
            found.edges += [(a, b, attrs) for a, b in zip(ends, ends[1:], strict=False)]
        elif name in ("graph", "node", "edge"):
            found.attrs |= attributes() if name == "graph" else {}
            if name != "graph":
                attributes()  # how things look
        else:
            found.nodes.setdefault(name, {}).update(attributes())
    if missing := [x for a, b, _ in found.edges for x in (a, b) if x not in found.nodes]:
        raise SparseError(f"an edge of the DOT text has node {missing[0]!r}", "describe this node")
    return found


def _words(text: str) -> list[tuple[str, int]]:
    """(word, line) of all that is not space or comment; strings without their quotes."""
    found: list[tuple[str, int]] = []
    line = 1
    for match in _WORDS.finditer(text):
        if match.lastgroup == "other":
            raise SparseError(f"line {line} of the DOT text has {match.group()!r}", "leave this character out")
        if match.lastgroup == "string":
            found.append((re.sub(r'\\(["\\])', r"\1", match["string"]), line))
        elif match.lastgroup == "word":
            found.append((match["word"], line))
        line += match.group().count("\n")
    return found

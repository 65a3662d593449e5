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
    found = _Parser(text).digraph()
    if missing := [x for a, b, _ in found.edges for x in (a, b) if x not in found.nodes]:
        raise SparseError(f"an edge of the DOT text has node {missing[0]!r}", "describe this node")
    return found


class _Parser:
    """Goes through the words of a text; ``at`` is the next one."""

    def __init__(self, text: str) -> None:
        self.words, self.lines, self.at = _words(text), text.count("\n") + 1, 0
        self.found = DotText()

    def peek(self, offset: int = 0) -> str:
        return self.words[self.at + offset][0] if self.at + offset < len(self.words) else ""

    def fail(self, expected: str) -> SparseError:
        line = self.words[self.at][1] if self.at < len(self.words) else self.lines
        return SparseError(f"line {line} of the DOT text has {self.peek() or 'its end'!r}", f"write {expected} there")

    def digraph(self) -> DotText:
        if self.peek() != "digraph":
            raise self.fail("digraph")
        self.at += 1
        self.at += self.peek() != "{"
        if self.peek() != "{":
            raise self.fail("{")
        self.at += 1
        while self.peek() != "}":
            if not self.peek():
                raise self.fail("}")
            name = self.peek()
            self.at += 1
            if name != ";":
                self.statement(name)
        return self.found

    def statement(self, name: str) -> None:
        """One that begins with ``name``, which was taken."""
        if self.peek() == "=":
            self.found.attrs[name] = self.peek(1)
            self.at += 2
        elif self.peek() == "->":
            ends = [name]
            while self.peek() == "->":
                ends.append(self.peek(1))
                self.at += 2
            attrs = self.attributes()
            self.found.edges += [(a, b, attrs) for a, b in zip(ends, ends[1:], strict=False)]
        elif name == "graph":
            self.found.attrs |= self.attributes()
        elif name in ("node", "edge"):
            self.attributes()  # how things look
        else:
            self.found.nodes.setdefault(name, {}).update(self.attributes())

    def attributes(self) -> dict[str, str]:
        attrs: dict[str, str] = {}
        while self.peek() == "[":
            self.at += 1
            while self.peek() != "]":
                if self.peek(1) != "=":
                    raise self.fail("name=value, or ]")
                attrs[self.peek()] = self.peek(2)
                self.at += 3
                self.at += self.peek() in (",", ";")
            self.at += 1
        return attrs


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

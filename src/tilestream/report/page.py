"""A report of sections, tables and pictures as one self-contained HTML file, in the style of the others."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from tilestream import files


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows, in words."""

    png: bytes
    alt: str

    @property
    def uri(self) -> Markup:
        return Markup("data:image/png;base64,") + base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Table:
    """Cells as text; ``numbers`` names the columns that are set to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, then pictures, then tables."""

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """``cards`` are (value, label): what to read first."""

    title: str
    subtitle: str
    cards: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str = ""


def render(page: Page) -> str:
    """The page as text; nothing in it refers to anything outside it."""
    loader = jinja2.PackageLoader("tilestream.report", "templates")
    return jinja2.Environment(loader=loader, autoescape=True).get_template("page.html.j2").render(page=page)


def write(path: Path, page: Page) -> Path:
    """Write the page to ``path`` and return it."""
    return files.write(path, render(page))

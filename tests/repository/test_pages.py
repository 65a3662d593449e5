"""Pages hang together: every link and heading that one names is there, every page is in the index, every command and
script that one tells to run exists with its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from places import ROOT

from tilestream.cli.main import app

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(ROOT.glob("docs/*.md"))]
MOST_LINES = 500
"""Of a page, but for those in ``LONG``."""
LONG = {"sparse-results.md"}
"""Written by a script but for its head: tables to look things up in."""

pytestmark = pytest.mark.smoke


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


@cache
def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What ``#...`` may name on the page, by GitHub's rule: lower case, words joined by hyphens, repeats numbered."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = next(n for n in range(100) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{again}" if again else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_and_headings_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not heading or heading in anchors(target), f"{page.name} links to {link}, and there is no such heading"


def test_headings_have_the_names_that_github_gives_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# JSON of `bench`\n```\n# no heading\n```\n## (A X) W\n## A\n## A\n## [Link](x.md), and\n")
    assert anchors(page) == {"json-of-bench", "a-x-w", "a", "a-1", "link-and"}


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert {p.name for p in ROOT.glob("docs/*.md")} - {"index.md"} == linked
    examples = set(re.findall(r"\]\(\.\./examples/(\w+\.py)\)", index))
    assert {p.name for p in ROOT.glob("examples/*.py")} == examples


def test_pages_can_be_read_in_one_sitting() -> None:
    lengths = {p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in ROOT.glob("docs/*.md")}
    assert {name for name, lines in lengths.items() if lines > MOST_LINES} <= LONG


# ---- commands


ROOT_COMMAND = typer.main.get_command(app)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every call of ``tilestream`` in code, without its name and comment."""
    text = page.read_text(encoding="utf-8")
    in_line = re.findall(r"`tilestream ([^`]+)`", prose(page))
    in_blocks = [
        line
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^tilestream (.*)$", block, re.MULTILINE)
    ]
    for call in (*in_line, *in_blocks):
        yield call.split(" #")[0].split()


def problem(words: list[str]) -> str | None:
    """What is wrong with a call; None where the command and all its options exist."""
    command, rest = ROOT_COMMAND, list(words)
    while rest and rest[0] in (below := getattr(command, "commands", {})):
        command = below[rest.pop(0)]
    if command is ROOT_COMMAND and not rest[0].startswith("-") and rest[0] not in ("COMMAND", "..."):
        return f"no command {rest[0]}"
    known = {"--help", *(option for p in command.params for option in (*p.opts, *p.secondary_opts))}
    given = {word.split("=")[0].rstrip(",.") for word in rest if word.startswith("--")}
    return f"{command.name} has no {', '.join(sorted(given - known))}" if given - known else None


def test_commands_that_pages_name_exist_with_their_options() -> None:
    found = [(page.name, words) for page in PAGES for words in commands(page)]
    assert len(found) > 35
    assert not [(page, why, words) for page, words in found if (why := problem(words))]


@pytest.mark.parametrize("call", ["explode nerf", "explain nerf --devise h200", "sparse run x --parallell i=2"])
def test_a_wrong_command_would_be_seen(call: str) -> None:
    assert problem(call.split())


def leaves(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every command's path, and its options."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, [max(p.opts, key=len) for p in command.params if p.opts[0].startswith("--")]  # type: ignore[attr-defined]
        return
    for name, one in below.items():
        yield from leaves(one, (*path, name))


def test_every_option_is_on_a_page() -> None:
    cli, sparse = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("cli.md", "sparse.md"))
    for path, options in leaves(ROOT_COMMAND):
        told = cli + sparse if path[0] == "sparse" else cli
        written = set(re.findall(r"--[a-z-]+", told))
        for option in options:
            assert {option, f"--no-{option[2:]}"} & written, f"tilestream {' '.join(path)} {option}"


def test_scripts_that_pages_name_exist_with_their_options() -> None:
    calls = [
        (page.name, script, re.findall(r"--[a-z-]+", rest))
        for page in PAGES
        for script, rest in re.findall(
            r"python -m (benchmarks[.\w]+)((?: +[\w.=/-]+)*)", prose(page).replace("\n", " ")
        )
    ]
    assert len(calls) > 30
    for page, script, options in calls:
        path = ROOT / f"{script.replace('.', '/')}.py"
        assert path.exists(), f"{page} names {script}"
        code = path.read_text(encoding="utf-8")
        assert not [o for o in options if f'"{o}"' not in code], f"{page}: {script} {options}"


def test_files_of_the_source_that_pages_name_exist() -> None:
    """Every ``room/file``, ``room/file.py`` and ``room/file.function`` in backticks is there."""
    rooms = {p.name for p in (ROOT / "src" / "tilestream").iterdir() if p.is_dir()} | {"tests", "benchmarks", "docs"}
    found = 0
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # it names what was there then
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+(?:\.[a-z_]+)?)`", prose(page)):
            if name.split("/")[0] not in rooms:
                continue
            found += 1
            paths = [ROOT / folder / name for folder in ("", "src/tilestream", "tests", "benchmarks/results")]
            assert any(p.exists() or p.with_suffix(".py").exists() for p in paths), f"{page.name} names {name}"
    assert found > 100

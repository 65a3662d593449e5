"""The house: what may import what, and that nothing imports itself through others."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import PACKAGE

ROOMS = (
    ("errors", "interrupts"),
    ("announce", "files", "options"),
    ("ir", "devices"),
    ("kernels",),
    ("graph", "simulator"),  # what a plan is made of, and what it is predicted by
    ("plan",),
    ("cuda", "reference"),  # two ways to run a pipeline, which never meet
    ("run",),
    ("apps",),
    ("report", "sparse"),
    ("bench", "studies"),
    ("cli",),
    ("__main__",),
)
"""Floors from the ground up. A room imports from the floors below it, never from its own floor or above."""

ROOT = {"__init__", "__main__", "announce", "errors", "files", "interrupts", "options"}


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports: at its top, inside functions, and for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "tilestream")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tilestream":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _file(inner) is not None else str(node.module)


def _file(module: str) -> Path | None:
    inside = PACKAGE.joinpath(*module.split(".")[1:])
    return next((p for p in (inside.with_suffix(".py"), inside / "__init__.py") if p.exists()), None)


def _modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache  # not at the top: every process that collects the tests would read the whole package
def graph() -> dict[str, list[str]]:
    """By module, those that it imports."""
    return {name: sorted(set(imports(path)) - {name}) for name, path in _modules().items()}


def test_the_root_holds_seven_modules() -> None:
    assert {p.stem for p in PACKAGE.glob("*.py")} == ROOT


def test_every_room_has_a_floor() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} | ROOT - {"__init__"}
    assert rooms == {room for floor in ROOMS for room in floor}


def test_imports_point_down() -> None:
    floor = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
    wrong = []
    for module, targets in graph().items():
        room = module.split(".")[1] if "." in module else "__init__"
        for target in targets:
            other = target.split(".")[1] if "." in target else "__init__"
            if "__init__" in (room, other) or other == room:
                continue  # the package's own page is for users, and reaches everywhere
            if floor[other] >= floor[room]:
                wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_only_the_upper_floors_read_the_users_page() -> None:
    readers = {module.split(".")[1] for module, targets in graph().items() if "tilestream" in targets and "." in module}
    assert readers <= {"bench", "cli"}


def test_nothing_imports_itself_through_others() -> None:
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail(" -> ".join((*path[path.index(module) :], module)))
        if module not in finished:
            for target in graph()[module]:
                visit(target, (*path, module))
            finished.add(module)

    for module in graph():
        if module != "tilestream":
            visit(module, ())


def test_the_drawing_of_the_house_is_true() -> None:
    """``docs/architecture.md`` draws an arrow from a room to each that it imports, but for those that others of its
    arrows lead to; the two lowest floors, which all rooms read, and the root are left out."""
    low = {"errors", "interrupts", "announce", "files", "options", "__init__", "__main__"}
    reads: dict[str, set[str]] = {}
    for module, targets in graph().items():
        rooms = {target.split(".")[1] for target in targets if "." in target} - low
        if "." in module and (room := module.split(".")[1]) not in low:
            reads[room] = reads.get(room, set()) | rooms - {room}
    behind: dict[str, set[str]] = {}
    for floor in ROOMS:
        for room in sorted(set(floor) - low):
            behind[room] = reads[room].union(*(behind[r] for r in reads[room]))
    arrows = {(a, b) for a, rooms in reads.items() for b in rooms if not any(b in behind[c] for c in rooms)}
    text = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    assert sorted(re.findall(r"(\w+) --> (\w+)", drawing)) == sorted(arrows)


def test_no_file_is_over_500_lines() -> None:
    root = PACKAGE.parent.parent
    files = [p for room in ("src", "tests", "benchmarks", "examples") for p in (root / room).rglob("*.*")]
    written = [p for p in files if p.suffix in (".py", ".cuh", ".h", ".cpp", ".j2") and "golden" not in p.parts]
    assert len(written) > 500
    assert not [p.name for p in written if len(p.read_text(encoding="utf-8").splitlines()) > 500]


@pytest.mark.smoke
def test_every_module_can_be_imported() -> None:
    for module in graph():
        if not module.endswith("__main__"):
            importlib.import_module(module)

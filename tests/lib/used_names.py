"""Names that a file of tests patches, or takes from tilestream, looked up without running the file.

Imports are followed, and so are variables that stand for a module or a class: ``m = import_module("a.b")``,
``for m in (one, two)``, a class of the file's own. What else a name stands for is not known.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

METHODS = ("setattr", "delattr", "object")
"""Of ``pytest.MonkeyPatch`` and of ``mock.patch``: they take an object and the name of what they change."""

FUNCTIONS = ("setattr", "delattr", "patch", "mock.patch")


@dataclass(frozen=True)
class OwnClass:
    """A class that the file defines."""

    body: ast.ClassDef

    def has(self, name: str) -> bool:
        """Whether it has the attribute, or may have it from another class."""
        made = {node.name for node in self.body.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        made |= {node.id for node in _of_scope(self.body) if _is_stored(node)}
        return name in made or bool(self.body.bases)


@dataclass
class Used:
    """What was found in a file; ``missing`` and ``unknown`` say it of a line each.

    Attributes:
        patched: how many patches were looked up.
        unknown: patches of what is not known.
    """

    patched: int = 0
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def used(text: str, package: str = "") -> Used:
    """The names that a file of this text patches; those that it takes from the modules and classes of ``package``."""
    reader = _Reader(package)
    reader.visit(ast.parse(text))
    return reader.found


class _Reader(ast.NodeVisitor):
    """Goes through a file's scopes from the outside in.

    Attributes:
        scopes: those around the present place, the file's first: a function a binding, that finds what it binds.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.found = Used()
        self.scopes: list[dict[str, list[Callable[[], Sequence[Any]]]]] = []

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, _SCOPES):
            return super().generic_visit(node)
        self.scopes.append({})
        for inner in _of_scope(node):
            self._bind(inner)
        super().generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self._patch(node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for thing in self._known(node.value):
            if self._is_held(thing):
                self._hold(node, thing, node.attr)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if self.package and (node.module or "").split(".")[0] == self.package:
            for alias in node.names:
                self._hold(node, importlib.import_module(str(node.module)), alias.name)

    def _is_held(self, thing: Any) -> bool:
        """Whether names that are read of a thing are looked up."""
        place = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
        return isinstance(thing, (ModuleType, type)) and str(place).split(".")[0] == self.package

    def _hold(self, node: ast.expr | ast.stmt, thing: Any, name: str) -> None:
        if not (thing.has(name) if isinstance(thing, OwnClass) else _got(thing, name)):
            called = thing.body.name if isinstance(thing, OwnClass) else getattr(thing, "__name__", thing)
            self.found.missing.append(f"line {node.lineno}: {called} has no {name}")

    def _patch(self, node: ast.Call) -> None:
        """Look up what a call patches, if it is one that patches what must be there."""
        method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        lenient = any(k.arg == "raising" for k in node.keywords)
        if lenient or not (method or ast.unparse(node.func) in FUNCTIONS):
            return
        match node.args:
            case [ast.Constant(value=str(path)), *_]:
                self.found.patched += 1
                if not _at(path):
                    self.found.missing.append(f"line {node.lineno}: there is no {path}")
            case [owner, ast.Constant(value=str(name)), *_] if things := self._known(owner):
                self.found.patched += 1
                for thing in things:
                    self._hold(node, thing, name)
            case _ if method:
                self.found.unknown.append(f"line {node.lineno}: {ast.unparse(node)}")

    def _bind(self, node: ast.AST) -> None:
        """Add what a node of the innermost scope binds. What is not known hides a name of an outer scope all the same;
        of a name that is bound twice, one of each, neither is."""
        names, depth = self.scopes[-1], len(self.scopes)

        def add(name: str, find: Callable[[], Sequence[Any]] = tuple) -> None:
            names.setdefault(name, []).append(find)

        match node:
            case ast.Import():
                for alias in node.names:
                    path = alias.name if alias.asname else alias.name.split(".")[0]
                    add(alias.asname or path, lambda path=path: _module(path))
            case ast.ImportFrom():
                for alias in node.names:
                    add(alias.asname or alias.name, _from(str(node.module), alias.name))
            case ast.ClassDef():
                add(node.name, lambda: [OwnClass(node)])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                add(node.name)
            case ast.arg():
                add(node.arg)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() | ast.Subscript() as value):
                add(name, lambda: self._known(value, depth))
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=elements)):
                add(name, lambda: [thing for element in elements for thing in self._known(element, depth)])
            case ast.Name(id=name) if _is_stored(node) and name not in names:
                add(name)

    def _known(self, node: ast.expr, depth: int | None = None) -> Sequence[Any]:
        """All that an expression may stand for in the first ``depth`` scopes; empty where that is not known."""
        match node:
            case ast.Name(id=name):
                scopes = reversed(self.scopes[:depth])
                found = [find() for find in next((scope[name] for scope in scopes if name in scope), [])]
                return [thing for things in found for thing in things] if all(found) else ()
            case ast.Attribute(value=value, attr=name):
                got = [_got(thing, name) for thing in self._known(value, depth)]
                return [thing for things in got for thing in things] if all(got) else ()
            case ast.Call(func=func, args=[ast.Constant(value=str(path))]) if _ends(func, "import_module"):
                return _module(path)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(path))) if _ends(value, "modules"):
                return _module(path)
        return ()


_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _of_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the scopes in it; a statement comes before the names in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _of_scope(node)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _ends(node: ast.expr, name: str) -> bool:
    return ast.unparse(node).split(".")[-1] == name


# -- what is found, alone in a list; nothing where there is none


def _module(path: str) -> Sequence[Any]:
    try:
        return [importlib.import_module(path)]
    except ModuleNotFoundError:
        return ()


def _from(module: str, name: str) -> Callable[[], Sequence[Any]]:
    return lambda: [thing for found in _module(module) for thing in _got(found, name)]


def _got(thing: Any, name: str) -> Sequence[Any]:
    """An attribute, or a module of a package that nobody has loaded yet."""
    if isinstance(thing, ModuleType) and not hasattr(thing, name):
        return _module(f"{thing.__name__}.{name}") if hasattr(thing, "__path__") else ()
    return [getattr(thing, name)] if hasattr(thing, name) else ()


def _at(path: str) -> Sequence[Any]:
    """What ``pytest.MonkeyPatch`` finds at a dotted path."""
    try:
        return [pkgutil.resolve_name(path)]
    except (ImportError, AttributeError):
        return ()

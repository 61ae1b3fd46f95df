"""Who imports whom in a package that is mapped onto a folder, read from the source by path. Runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Arrows = Mapping[str, Collection[str]]
"""Who -> whom it imports."""
PARTS = ("body", "orelse", "finalbody", "handlers")  # statements in a statement


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the package at `root`, by its path without `.py`. No `__init__.py`, no package."""
    paths = [*root.glob("*.py"), *(path for package in packages(root) for path in package.glob("*.py"))]
    return {_name(root, path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}


def packages(folder: Path) -> Iterator[Path]:
    """The packages below a folder, at any depth."""
    for package in folder.iterdir():
        if (package / "__init__.py").is_file():
            yield package
            yield from packages(package)


def arrows(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Each module, and those of the same package that it imports anywhere in it, lazily and for types too."""
    return {name: set(_own(name, tree, trees)) - {name} for name, tree in trees.items()}


def foreign(tree: ast.AST) -> set[str]:
    """The top-level packages of other people, and those of the standard library, that are imported."""
    return {name.split(".")[0] for name in _absolute(tree)}


def at_module_level(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: no function's body, nothing under `if TYPE_CHECKING`."""
    return ast.Module([*_outer(tree.body)], [])


def _outer(nodes: Iterable[ast.AST]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        inner = {name: [*_outer(part)] for name in PARTS if (part := getattr(node, name, None))}
        yield type(node)(**{**dict(ast.iter_fields(node)), **inner}) if inner else node


def circle(graph: Arrows) -> list[str]:
    """One circle of arrows, its first member again at its end; empty when there is none."""
    closed: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for following in sorted(graph.get(path[-1], ())):
            if following in path:
                return [*path[path.index(following) :], following]
            if following not in closed and (found := walk([*path, following])):
                return found
        closed.add(path[-1])
        return []

    return next((found for start in sorted(graph) if start not in closed and (found := walk([start]))), [])


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


def _absolute(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _own(name: str, tree: ast.AST, trees: Collection[str]) -> Iterator[str]:
    """`from ..a import b`: b is a module or a package in the package a, or in the module a, or behind a's
    door.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            at = [*name.split("/")[: -node.level], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                inner = [*at, alias.name]
                places = ["/".join(place) for place in (inner, [*inner, "__init__"], at, [*at, "__init__"])]
                aim = next((place for place in places if place in trees), None)
                assert aim is not None, f"{name}.py, line {node.lineno}: {ast.unparse(node)} leads nowhere"
                yield aim

"""Finds the names in Python statements on which these depend: modules, files, directories and fixtures."""

from __future__ import annotations

import ast
import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Self

PACKAGES = ("slimx", "tests", "tools", "benchmarks", "examples")
MODULE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
"""A module or a name in one: slimx.rollout.single_turn.generate."""
FROM = re.compile(r"\bfrom ([\w.]+) import ([\w, ]+)")
"""Import statements in strings that contain programs."""
PATH = re.compile(r"[\w*][\w.*-]*(?:/[\w.*-]+)*")
REPOSITORY = re.compile(r"[A-Z_]+|.*__file__.*")
"""Base expressions of paths in the repository, as in ROOT / "configs". `tmp_path / "configs"` is a directory of a
test."""


class Names(ast.NodeVisitor):
    """Names in statements, without docstrings; `*` stands for the parts of a path that are no literals."""

    def __init__(self, package: PurePath):
        """Starts without names. `package`: directory to which relative imports refer."""
        self.package = package.parts
        self.imports: set[str] = set()
        """Modules and things in modules, by import statements and by attributes of a package, whose name alone is that
        of what it computes itself: slimx.__version__."""
        self.modules: set[str] = set()
        """The same, by strings."""
        self.files: set[str] = set()
        self.directories: set[str] = set()
        self.words: set[str] = set()
        """Function parameters and whole strings: both can request fixtures."""
        self.loaded: set[str] = set()
        """Variables that are read."""

    @classmethod
    def of(cls, statements: Iterable[ast.AST], package: PurePath) -> Self:
        names = cls(package)
        for statement in statements:
            names.visit(statement)
        return names

    def visit_Import(self, node: ast.Import) -> None:
        self.imports |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = self.package[: len(self.package) - node.level + 1] if node.level else ()
        module = ".".join((*parts, *filter(None, [node.module])))
        self.imports |= {f"{module}.{alias.name}" if alias.name[:2] != "__" else module for alias in node.names}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in PACKAGES and not node.attr.startswith("__"):
            self.imports.add(f"{node.value.id}.{node.attr}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.loaded.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.words.add(node.arg)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._string(text(node))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._string(text(node))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.op, ast.Div):
            self.generic_visit(node)
            return
        base, names = divided(node)
        path = "/".join(text(name) or "*" for name in names)
        self.files.add(path)
        if REPOSITORY.fullmatch(ast.unparse(base)):
            self.directories.add(path)
        for part in (base, *(name for name in names if not text(name))):
            self.visit(part)

    def _string(self, string: str) -> None:
        self.words.add(string)
        self.modules.update(MODULE.findall(string))
        self.modules.update(
            f"{module}.{name.strip()}" for module, names in FROM.findall(string) for name in names.split(",")
        )
        paths = PATH.findall(string)
        self.files.update(paths)
        self.directories.update(path for path in paths if "/" in path)


def text(node: ast.AST) -> str:
    """Returns a literal string with `*` for its fields; "" for other expressions."""
    match node:
        case ast.Constant(value=str(string)):
            return string
        case ast.JoinedStr():
            return "".join(text(part) or "*" for part in node.values)
    return ""


def divided(node: ast.expr) -> tuple[ast.expr, list[ast.expr]]:
    """Returns base and names of the path BASE / NAME / NAME."""
    names: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        names.insert(0, node.right)
        node = node.left
    return node, names


def fixtures(tree: ast.Module, package: PurePath) -> Iterator[tuple[str, Names]]:
    """Yields the fixtures of a conftest.py with the names that each depends on; "" is what every test has, its hooks
    and automatic fixtures.

    As one node a conftest.py would make every test depend on what any fixture imports, most of slimx.
    """
    defined: dict[str, list[ast.stmt]] = defaultdict(list)
    for statement in ast.walk(tree):
        match statement:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    one = copy.copy(statement)
                    one.names = [alias]
                    defined[alias.asname or alias.name.partition(".")[0]].append(one)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if statement in tree.body:
                defined[statement.name].append(statement)
            case ast.Assign() if statement in tree.body:
                for target in statement.targets:
                    defined[ast.unparse(target)].append(statement)
    always = []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(map(ast.unparse, function.decorator_list))
            if function.name.startswith("pytest_") or "autouse=True" in decorators:
                always.append(function)
            elif "fixture" in decorators:
                yield function.name, Names.of(used([function], defined, package), package)
    yield "", Names.of(used(always, defined, package), package)


def used(statements: list[ast.stmt], defined: dict[str, list[ast.stmt]], package: PurePath) -> list[ast.stmt]:
    """Returns `statements` and, transitively, the statements that define names used in them."""
    found = list(statements)
    for statement in found:  # which grows
        for name in Names.of([statement], package).loaded & defined.keys():
            found += [definition for definition in defined[name] if definition not in found]
    return found

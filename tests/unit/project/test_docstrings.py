"""Docstrings, of modules, classes, functions and attributes, that can be read without their name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FRAGMENT = re.compile(r"(Of|What|Whether|Which|Who|Whose|Where|How|That|If)\b")
"""First words of phrases that need the name of their function to make sense."""


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            # The first statement documents the node itself, one after an assignment the attribute.
            for before, here in zip([node, *node.body], node.body, strict=False):
                if not isinstance(before, ast.Assign | ast.AnnAssign) and before is not node:
                    continue
                text = here.value if isinstance(here, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield here.lineno, text.value


@pytest.mark.parametrize("folder", ["slimx", "tools", "benchmarks", "examples"])
def test_no_docstring_begins_as_a_fragment(folder):
    found = [
        (f"{path.relative_to(ROOT)}:{line}", text.splitlines()[0])
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        if FRAGMENT.match(text)
    ]
    assert found == []

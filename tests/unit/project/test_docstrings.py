"""Docstrings that can be read without the name beside them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FRAGMENT = re.compile(r"(Of|What|Whether|Which|Who|Whose|Where|How|That|If)\b")
"""First words of phrases that need the name of their function to make sense."""


@pytest.mark.parametrize("folder", ["slimx", "tools", "benchmarks", "examples"])
def test_no_docstring_begins_as_a_fragment(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and FRAGMENT.match(text):
                    found.append((str(path.relative_to(ROOT)), getattr(node, "name", ""), text.splitlines()[0]))
    assert found == []

"""Tests pin no sentence: messages to users can be worded better without a test that fails.

Found are sentences that stand in the comparison itself, not those that reach it through a variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
WORDS = 6
"""Words in a row with which a comparison is one with a sentence, and not with names and values."""
WORD = re.compile(r"[(\"'`]?[A-Za-z][A-Za-z'-]*[.,;:?!)\"'`]*")
SEARCHES = {"startswith", "endswith", "match", "fullmatch", "search", "findall", "count"}
"""Methods of strings, and functions of re, that look for their first argument, or in it."""


def words(node: ast.AST) -> int:
    """Counts plain words in a string, those between the values of an f-string together; 0 for anything else."""
    if isinstance(node, ast.JoinedStr):
        return sum(map(words, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return sum(WORD.fullmatch(word) is not None for word in node.value.split())
    return 0


def compared(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the expressions that `node` compares with others: sides of a comparison, patterns, beginnings and ends."""
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            yield from side.elts if isinstance(side, ast.List | ast.Tuple | ast.Set) else [side]
    elif isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "match")
        if isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            yield from node.args[:1]


def pinned(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of every sentence with which something is compared."""
    for node in ast.walk(tree):
        for side in compared(node):
            if words(side) >= WORDS:
                yield node.lineno, ast.unparse(side)


@pytest.mark.parametrize("folder", ["unit", "extras", "integration", "gpu"])
def test_no_test_pins_a_sentence(folder):
    found = [
        (f"{path.relative_to(TESTS)}:{line}", text)
        for path in sorted((TESTS / folder).rglob("*.py"))
        for line, text in pinned(ast.parse(path.read_text()))
    ]
    assert found == [], "assert a code, names and numbers (tests/refusals.py), or a file of tests/golden"


@pytest.mark.parametrize(
    "source",
    [
        'pytest.raises(SlimxError, match="the version on disk is not the one asked for")',
        'assert "the version on disk is not the one asked for" in str(error)',
        'assert str(error) == f"version {version} on disk is not the one asked for"',
        'assert notes == ["the version on disk is not the one asked for"]',
        'assert text.startswith("the version on disk is not the one")',
    ],
)
def test_a_sentence_is_found_wherever_it_is_pinned(source):
    assert [line for line, _ in pinned(ast.parse(source))] == [1]


def test_names_values_and_data_are_no_sentences():
    source = (
        'assert "publish.transport=nixl on rank 0 of 2" in text and found == ("engine.silent", "version 7 of actor")'
    )
    assert not list(pinned(ast.parse(source)))

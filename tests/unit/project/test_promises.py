"""Every section of the documentation has a promise with its tests in docs/promises.md, or stands in the list there."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/promises.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/guides").glob("*.md"))]
LIST = "\n## Sections without a promise\n"
FIRST_RING = ("tests/unit/", "tests/extras/", "tests/integration/")
"""Folders that `make test` runs."""
SECOND_RING = "`make test-all` "
"""Mark before the id of a test that only the second ring runs."""

TABLE, _, LISTED = PAGE.read_text().partition(LIST)
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| [")]
CITED = [cited for row in ROWS for cited in re.findall(r"(`make test-all` )?`(tests/[^`]+)`", row[-1])]
"""Mark and id of each test of the table."""


def headings(text: str) -> Iterator[tuple[str, str]]:
    """Yields tag and anchor of each heading, as GitHub makes it: words of the text in small letters, joined by hyphens,
    with a number where the page has had the same before."""
    seen = Counter[str]()
    tokens = MarkdownIt("commonmark").parse(text)
    for token, following in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            words = "".join(child.content for child in following.children or ())
            anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            yield token.tag, f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
            seen[anchor] += 1


def targets(text: str) -> list[str]:
    """Returns the pages and sections to which links of docs/promises.md lead, relative to the repository."""
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text)]
    found = [(str((PAGE.parent / page).resolve().relative_to(ROOT)), anchor) for page, _, anchor in links if page]
    return [f"{page}#{anchor}" if anchor else page for page, anchor in found]


@functools.cache
def sections() -> dict[str, list[str]]:
    """Returns the level-2 sections of each page."""
    pages = {str(path.relative_to(ROOT)): path for path in PAGES if path != PAGE}
    found = {page: list(headings(path.read_text())) for page, path in pages.items()}
    return {page: [f"{page}#{anchor}" for tag, anchor in titles if tag == "h2"] for page, titles in found.items()}


def test_every_section_has_a_promise_or_stands_in_the_list() -> None:
    required = {target for page, below in sections().items() for target in below or [page]}
    promised, listed = {target for row in ROWS for target in targets(row[0])}, {*targets(LISTED)}
    assert sorted(required - promised - listed) == [], "give each a row with its test in docs/promises.md"
    assert sorted(promised & listed) == []


def test_no_row_is_about_a_section_that_does_not_exist() -> None:
    there = {target for page, below in sections().items() for target in (page, *below)}
    assert sorted({*(target for row in ROWS for target in targets(row[0])), *targets(LISTED)} - there) == []


def test_each_row_has_a_promise_and_one_to_three_tests() -> None:
    counts = {" | ".join(row): (len(row), row[-1].count("`tests/")) for row in ROWS}
    assert [row for row, (cells, tests) in counts.items() if cells != 3 or not 1 <= tests <= 3] == []
    assert len(counts) == len(ROWS), "a row stands there twice"


class Module:
    """Tests of a file, read without importing it."""

    def __init__(self, text: str):
        body = ast.parse(text).body
        self.tests = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assigned = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
        self.values = {node.targets[0].id: node.value for node in assigned}

    def slow(self, test: str) -> bool:
        """Returns True if `make test` runs no case of the test."""
        marks = [self.values.get("pytestmark"), *self.tests[test].decorator_list]
        return any(self._marks(mark) or self._slow_cases(mark) for mark in marks)

    def _meant(self, node: ast.AST | None) -> ast.AST | None:
        return self.values.get(node.id) if isinstance(node, ast.Name) else node

    def _marks(self, node: ast.AST | None) -> bool:
        """Returns True for the mark `slow`, with a reason or without, and for a list that has it."""
        node = self._meant(node)
        if isinstance(node, ast.List | ast.Tuple):
            return any(map(self._marks, node.elts))
        if isinstance(node, ast.Call):
            node = node.func
        return isinstance(node, ast.Attribute) and node.attr == "slow"

    def _slow_cases(self, node: ast.AST | None) -> bool:
        """Returns True if `node` parametrises by slow cases alone. Cases made when the module runs count as others."""
        node = self._meant(node)
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize") and len(node.args) > 1):
            return False
        cases = self._meant(node.args[1])
        if not isinstance(cases, ast.List | ast.Tuple) or not cases.elts:
            return False
        arguments = [case.keywords if isinstance(case, ast.Call) else [] for case in cases.elts]
        return all(
            any(keyword.arg == "marks" and self._marks(keyword.value) for keyword in keywords) for keywords in arguments
        )


@functools.cache
def module(file: str) -> Module:
    return Module((ROOT / file).read_text() if (ROOT / file).is_file() else "")


def test_every_test_that_is_cited_exists() -> None:
    named = [test.split("::") for _, test in CITED]
    assert ["::".join(parts) for parts in named if len(parts) != 2 or parts[1] not in module(parts[0]).tests] == []


def test_no_promise_of_the_first_ring_rests_on_a_slow_test() -> None:
    first = [test for mark, test in CITED if mark != SECOND_RING]
    assert [test for test in first if not test.startswith(FIRST_RING)] == []
    slow = [test for test in first if module(test.partition("::")[0]).slow(test.partition("::")[2])]
    assert slow == [], "choose another test in docs/promises.md, or leave this one in `make test`"


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("{}", False),
        ("@pytest.mark.slow\n{}", True),
        ("@pytest.mark.slow('an hour')\n{}", True),
        ("@pytest.mark.costly\n{}", False),
        ("pytestmark = pytest.mark.slow\n{}", True),
        ("pytestmark = [pytest.mark.integration, pytest.mark.slow('an hour')]\n{}", True),
        ("LONG = pytest.mark.slow('an hour')\n@LONG\n{}", True),
        ("@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.slow)])\n{}", False),
        ("@pytest.mark.parametrize('n', [pytest.param(2, marks=[pytest.mark.slow('long')])])\n{}", True),
        ("@pytest.mark.parametrize('n', [pytest.param(n, marks=[] if n else pytest.mark.slow) for n in N])\n{}", False),
        ("ALL = [pytest.param(1, marks=pytest.mark.slow)]\n@pytest.mark.parametrize('n', ALL)\n{}", True),
    ],
)
def test_a_slow_test_is_known_by_its_marks(text: str, slow: bool) -> None:
    assert Module(text.format("async def test_it(n): ...")).slow("test_it") is slow


def test_anchors_are_those_of_github() -> None:
    text = "# A\n## `--json`\n## slime's names\n## Megatron-LM, slime\n## eval_reward\n### A\n"
    assert [anchor for _, anchor in headings(text)] == [
        *("a", "--json", "slimes-names", "megatron-lm-slime", "eval_reward", "a-1")
    ]

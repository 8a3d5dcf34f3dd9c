"""Refuses the mechanical signs of prose that has to be decoded: `python -m tools.words [PATH ...]`.

Reads docstrings, strings with spaces (messages, help texts) and identifiers of Python files, and the text of Markdown
pages. Prints one line per finding, `path:line: finding`, and ends with status 1 if there is any.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("slimx", "tools", "benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Folders whose files are read if no path is given."""

PHRASES = re.compile(
    r"\b(told|whoever|whomever|beside|nobody|as of|so many|for good|is said|are said|was said|tells? of|tell of"
    r"|in the light of|wherever|whatsoever|thereof|stands? still)\b",
    re.IGNORECASE,
)
"""Turns of phrase that no page of the field uses in the sense that they had here."""
OPENINGS = re.compile(r"(?:^|[.!?;:]\s+)(What|Whoever|Of|Beside|Whether|As of|Out of)\b")
"""First words of sentences that put a relative clause or a genitive before the verb."""
IDENTIFIERS = frozenset({"told", "said", "held", "own", "each", "given", "asked", "wanted", "way"})
"""Participles and pronouns that stand where a name should say what the value is."""
TERMS = frozenset({"held_out"})
"""Terms of the field that contain one of them."""

VERBS = frozenset((ROOT / "tools/verbs.txt").read_text().split())
"""First words of functions' docstrings: what a function does, in the third person."""


def python_findings(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and finding for everything in a Python file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _function_findings(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from _opening_findings(node.lineno, node.value.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from _phrase_findings(node.lineno, node.value)
        for name, line in _names(node):
            if name.strip("_").lower() not in TERMS and IDENTIFIERS & set(name.lower().split("_")):
                yield line, f"name `{name}`: name the value by its noun"
    for line, comment in enumerate(text.splitlines(), 1):
        if comment.lstrip().startswith("#"):
            yield from _phrase_findings(line, comment)


def _function_findings(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    text = ast.get_docstring(node)
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not text or any(re.search(r"(property|\.fixture)$|\.(command|callback)\(", name) for name in decorators):
        return
    first = text.split()[0].rstrip(",;:.")
    if first not in VERBS:
        yield node.body[0].lineno, f"docstring of `{node.name}` begins with {first!r}, no verb of the third person"


def _opening_findings(line: int, text: str) -> Iterator[tuple[int, str]]:
    for match in OPENINGS.finditer(text):
        yield line + text.count("\n", 0, match.start()), f"a sentence begins with {match[1]!r}"


def _phrase_findings(line: int, text: str) -> Iterator[tuple[int, str]]:
    for match in PHRASES.finditer(text):
        yield line + text.count("\n", 0, match.start()), f"{match[0]!r}"


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields every name that the node defines or uses, with its line."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name, node.lineno
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, node.lineno
        case ast.keyword(arg=str(name)):
            yield name, node.value.lineno


def page_findings(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and finding for everything in a Markdown page, code blocks left out."""
    code = False
    for line, row in enumerate(text.splitlines(), 1):
        if row.lstrip().startswith("```"):
            code = not code
        elif not code:
            prose = re.sub(r"`[^`]*`", "`code`", row)
            yield from _phrase_findings(line, prose)
            yield from _opening_findings(line, prose)


def findings(paths: Iterable[Path]) -> list[str]:
    """Returns a line per finding in files and folders."""
    lines = []
    for path in paths:
        files = sorted([*path.rglob("*.py"), *path.rglob("*.md")]) if path.is_dir() else [path]
        for file in files:
            if file.resolve() == Path(__file__).resolve():
                continue  # it names what it refuses
            read = page_findings if file.suffix == ".md" else python_findings
            lines += [f"{file}:{line}: {finding}" for line, finding in sorted(set(read(file.read_text())))]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help=f"files and folders; {', '.join(FOLDERS)}")
    lines = findings(parser.parse_args().paths or [ROOT / name for name in FOLDERS])
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

"""Lines of code by room: `python tools/lines.py [DEPTH]`, without imports, docstrings, comments and blank lines.

DEPTH is the number of folders below slimx/ that get a row of their own, 2 unless it is given.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "slimx"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of `source` that hold code: a token that is no comment, outside imports and strings that stand alone."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        alone = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if alone or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("depth", type=int, nargs="?", default=2, metavar="DEPTH")
    depth = parser.parse_args().depth
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        room = "/".join(path.relative_to(ROOT).parent.parts[:depth]) or "."
        lines[room] += code_lines(path.read_text())
        files[room] += 1
    for room in sorted(lines):
        print(f"{room:32}{files[room]:5} files{lines[room]:8,} lines")
    print(f"{'slimx':32}{sum(files.values()):5} files{sum(lines.values()):8,} lines")


if __name__ == "__main__":
    main()

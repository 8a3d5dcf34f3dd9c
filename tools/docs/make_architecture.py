"""Draws docs/architecture.svg from the import contracts: the packages of slimx, layer by layer, with what each is for.

    python tools/docs/make_architecture.py

Layers come from pyproject.toml, where import-linter checks them; the text in a box is the first line of the package's
docstring. A unit test compares the picture with both, so run this after a change of either.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"

WIDTH, MARGIN, GAP = 1200, 24, 12
"""Width of the picture, its margin, and the gap between boxes, in pixels."""
LINE, PADDING, TITLE = 17, 12, 22
CHARACTER, MONOSPACED = 6.7, 7.3
"""Mean width of a character of the text, and width of one of a sub-package's name, in pixels."""


@dataclass(frozen=True)
class Package:
    """A package or a module directly below slimx/."""

    name: str
    text: str
    inner: tuple[str, ...]
    """Names of the package's subpackages."""


def layers(pyproject: str) -> list[list[str]]:
    """Returns the names of packages by layer, topmost first, from the text of pyproject.toml."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    layered = (contract for contract in contracts if contract["type"] == "layers")
    (contract,) = (contract for contract in layered if contract["containers"] == ["slimx"])
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def read_package(name: str) -> Package:
    """Reads the package slimx/`name` and its docstring."""
    folder = ROOT / "slimx" / name
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = (ast.get_docstring(ast.parse(source.read_text())) or "").split("\n\n")[0]
    inner = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    return Package(name, " ".join(text.split()).replace("`", ""), tuple(inner))


def draw(packages: list[list[Package]]) -> str:
    """Returns the picture as SVG, with one row of boxes per layer."""
    parts, top = [], float(MARGIN)
    for row in packages:
        width = (WIDTH - 2 * MARGIN - 28 - GAP * (len(row) - 1)) / len(row)
        columns = int((width - 2 * PADDING) / CHARACTER)
        names = int((width - 2 * PADDING) / MONOSPACED)
        texts = [(textwrap.wrap(package.text, columns), _wrapped(package.inner, names)) for package in row]
        height = max(len(text) + len(inner) for text, inner in texts) * LINE + TITLE + 2 * PADDING
        for number, (package, (text, inner)) in enumerate(zip(row, texts, strict=True)):
            parts.append(_box(package.name, text, inner, MARGIN + 28 + number * (width + GAP), top, width, height))
        top += height + GAP
    end = top + MARGIN - GAP
    arrow = (
        f'<path d="M{MARGIN + 8} {MARGIN} V{end - MARGIN - 8}" class="arrow" marker-end="url(#head)"/>'
        f'<text class="side" transform="translate({MARGIN - 2} {end / 2:.0f}) rotate(-90)">'
        "imports only downwards</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end:.0f}" role="img" '
        'aria-label="Packages of slimx by layer; each imports only from layers below its own">\n'
        "<style>text{font:13px system-ui,sans-serif;fill:#1f2933}.name{font-weight:600;font-size:15px}"
        ".inner{fill:#2563a8;font-family:ui-monospace,monospace;font-size:12px}"
        ".side{text-anchor:middle;fill:#616e7c}.arrow{stroke:#9aa5b1;stroke-width:2}"
        "rect.package{fill:#f5f8fb;stroke:#b8c4d0}</style>\n"
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 Z" fill="#9aa5b1"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{end:.0f}" fill="#ffffff"/>\n{arrow}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _wrapped(names: Sequence[str], columns: int) -> list[str]:
    """Breaks names into lines of at most `columns` characters; no line begins with a separator."""
    lines = textwrap.wrap("\u00a0· ".join(names), columns, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def _box(name: str, text: list[str], inner: list[str], left: float, top: float, width: float, height: float) -> str:
    x, y = left + PADDING, top + PADDING + 12
    lines = [f'<text class="name" x="{x:.1f}" y="{y:.1f}">{escape(name)}</text>']
    for kind, content in ((None, text), ("inner", inner)):
        for line in content:
            y += LINE if len(lines) > 1 else TITLE
            style = f' class="{kind}"' if kind else ""
            lines.append(f'<text{style} x="{x:.1f}" y="{y:.1f}">{escape(line)}</text>')
    box = f'<rect class="package" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
    return box + "".join(lines)


def picture() -> str:
    """Returns docs/architecture.svg for the current contracts and docstrings."""
    names = layers((ROOT / "pyproject.toml").read_text())
    return draw([[read_package(name) for name in row] for row in names])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PICTURE.write_text(picture())

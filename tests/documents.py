"""Fenced blocks of the documentation's pages, as CommonMark reads them: what a user copies, and tests execute."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PROGRAMS = (".venv/bin/", "make ", "python ", "slimx ")
"""How lines begin that are commands."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    """The page, relative to the repository."""
    name: str
    """The heading above it and its number below that heading, such as `Change it 2`: a page's names differ."""
    language: str
    """The word after the fence, such as `yaml`; empty: none, as for commands and what they print."""
    text: str
    line: int
    """The line of the page where its text begins, from 1."""

    @property
    def file(self) -> str | None:
        """The file that the block is, by its first line (`# name.yaml`); None: it is a part of one, or no file."""
        named = re.match(r"# ([\w-]+\.(?:yaml|py))\n", self.text)
        return named[1] if named else None

    def commands(self) -> list[list[str]]:
        """Words of each command in it as a shell reads them, without the prompt `$` and comments. A line that begins
        with none of PROGRAMS is what a command prints, or a picture."""
        lines = [line.removeprefix("$ ") for line in self.text.replace("\\\n", " ").splitlines()]
        return [shlex.split(line, comments=True) for line in lines if line.startswith(PROGRAMS)]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page of the repository, in order."""
    heading, counted, found = "", Counter[str](), []
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text())
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            heading = following.content
        if token.type == "fence":
            counted[heading] += 1
            name = f"{heading} {counted[heading]}"
            found.append(Block(page, name, token.info.strip(), token.content, token.map[0] + 2))
    return found

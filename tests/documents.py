"""Fenced blocks and commands of the documentation's pages, as CommonMark reads them: what users copy, and tests try."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
PROGRAMS = (".venv/bin/", "kubectl ", "make ", "pip ", "python ", "ray ", "sbatch ", "scripts/launch/", "slimx ")
"""How code in a sentence begins that is a command."""
LANGUAGES = ("bash", "console", "json", "python", "text", "yaml")
"""Languages of blocks; `text` is output or a picture."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    """The page, relative to the repository."""
    name: str
    """The heading above it and its number below that heading, such as `Change it 2`: a page's names differ."""
    language: str
    """The word after the fence, one of LANGUAGES."""
    text: str
    line: int
    """The line of the page where its text begins, from 1."""

    @property
    def file(self) -> str | None:
        """The file that the block is, by its first line (`# name.yaml`); None: it is a part of one, or no file.
        Launch scripts are read, not run."""
        named = re.match(r"# ([\w-]+\.(?:yaml|py|sh))\n", self.text)
        return named[1] if named else None

    def commands(self) -> list[list[str]]:
        """Words of each command as a shell reads them, without assignments before it: every line of `bash`, those of
        `console` after the prompt `$`."""
        if self.language not in ("bash", "console") or "<<" in self.text or self.file:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found = [shlex.split(line, comments=True) for line in lines]
        commands = [[*dropwhile(lambda word: re.match("[A-Z_]+=", word), words)] for words in found]
        return [words for words in commands if words]


def spans(page: str) -> list[list[str]]:
    """Words of each command in the sentences and tables of a page: code that begins with one of PROGRAMS. Brackets
    around what may be left out are removed, and dots that stand for more words."""
    found: dict[str, None] = {}
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text()):
        found |= dict.fromkeys(child.content for child in token.children or () if child.type == "code_inline")
    texts = [*found]
    for _ in range(2):  # one bracket may be within another
        texts = [re.sub(r"(?<= )\[([^\[\]]*)\](?= |$)", r"\1", text) for text in texts]
    texts = [re.sub(r"(?<= )\.\.\.(?= |$)", "", text) for text in texts]
    return [shlex.split(text) for text in texts if text.startswith(PROGRAMS)]


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


COMMANDS = [words for page in PAGES for words in spans(page)]
COMMANDS += [words for page in PAGES for block in blocks(page) for words in block.commands()]
"""Words of every command of a page."""
ELSEWHERE = {
    "build/hubs/verifiers/bin/python": "is made by make hubs",
    "git clone": "needs a network",
    "hf download": "needs a network",
    "kubectl create": "needs a Kubernetes cluster",
    "ln -s": "links files that git clone brings",
    "pip check": "takes a minute of CPU time and is no part of slimx",
    "python -m nltk.downloader": "needs a network",
    "python -m uvicorn": "serves an environment of another project",
    "python -m slimx.engines.server.launch": "parses SGLang's options after importing SGLang",
    "ray status": "needs a Ray cluster",
}
"""Beginnings of commands that are not tried, each with the reason."""


def elsewhere(words: Sequence[str]) -> str | None:
    """Returns the key of ELSEWHERE that a command begins with; None: it is tried."""
    return next((key for key in ELSEWHERE if " ".join(words).startswith(key)), None)


def python_program(words: Sequence[str]) -> list[str] | None:
    """Returns the arguments of Python for a program of the repository; None: the command is something else."""
    if not Path(words[0]).name.startswith("python") or elsewhere(words) or words[1:3] == ["-m", "pytest"]:
        return None
    return list(words[1:])

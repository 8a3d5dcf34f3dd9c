"""Finds answers and programs in a text that a model wrote, behind its thinking."""

from __future__ import annotations

import re

from slimx.data.chat.responses import final_answer

_FENCE = re.compile(r"(?<![`~])(?:`{3,}|~{3,})")
_PYTHON = re.compile(r"\{?\.?(?:python[\d.]*|py\d?)(?![\w+#-])", re.IGNORECASE)


def marked_answer(text: str) -> str | None:
    """The text between <answer> and </answer>; None if there is none or more than one: who gives several answers has
    not answered."""
    first, *more = final_answer(text).split("<answer>")[1:] or [""]
    answer, end, rest = first.partition("</answer>")
    return answer.strip() if end and not any("</answer>" in each for each in more) else None


def last_program(text: str) -> str | None:
    """The last fenced block of Python, of no language where none is of Python; None if there is none, and where it is
    torn, without an end."""
    python: list[str | None] = []
    plain: list[str | None] = []
    block: list[str] | None = None
    fence, blocks = "", plain
    for line in final_answer(text).split("\n"):
        marks = list(_FENCE.finditer(line))
        if block is None:
            if len(marks) % 2:  # two on a line are code in a sentence
                language = line[marks[-1].end() :].strip()
                fence, block = marks[-1][0], []
                blocks = python if _PYTHON.match(language) else plain if not language else []
        elif (
            marks and marks[-1][0][0] == fence[0] and len(marks[-1][0]) >= len(fence) and line.rstrip().endswith(fence)
        ):
            if line[: marks[-1].start()].strip():
                block.append(line[: marks[-1].start()])
            blocks.append("".join(f"{each}\n" for each in block))
            block = None
        else:
            block.append(line)
    if block is not None:
        blocks.append(None)
    found = python or plain
    return found[-1] if found else None

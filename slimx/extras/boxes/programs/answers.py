"""Finds answers and programs in a model's response, after its thinking."""

from __future__ import annotations

import re

from slimx.data.chat.responses import final_answer

_FENCE = re.compile(r"(?<![`~])(?:`{3,}|~{3,})")
_PYTHON = re.compile(r"\{?\.?(?:python[\d.]*|py\d?)(?![\w+#-])", re.IGNORECASE)


def marked_answer(text: str) -> str | None:
    """Returns the text between <answer> and </answer>; None if there are no such tags, or more than one pair."""
    parts = final_answer(text).split("<answer>")[1:]
    if not parts or any("</answer>" in part for part in parts[1:]):
        return None
    answer, end, _ = parts[0].partition("</answer>")
    return answer.strip() if end else None


def last_program(text: str) -> str | None:
    """Returns the last fenced Python block, or else the last block without a language.

    Returns None if there is none, or if that block is not closed.
    """
    python: list[str | None] = []
    plain: list[str | None] = []
    blocks = plain
    block: list[str] | None = None
    fence = ""
    for line in final_answer(text).split("\n"):
        marks = list(_FENCE.finditer(line))
        if block is None:
            if len(marks) % 2:  # two fences on one line are inline code
                language = line[marks[-1].end() :].strip()
                fence = marks[-1][0]
                block = []
                if _PYTHON.match(language):
                    blocks = python
                elif not language:
                    blocks = plain
                else:
                    blocks = []
        elif marks and _closes(marks[-1][0], fence) and line.rstrip().endswith(fence):
            if line[: marks[-1].start()].strip():
                block.append(line[: marks[-1].start()])
            blocks.append("".join(f"{code}\n" for code in block))
            block = None
        else:
            block.append(line)
    if block is not None:
        blocks.append(None)
    candidates = python or plain
    return candidates[-1] if candidates else None


def _closes(mark: str, fence: str) -> bool:
    return mark[0] == fence[0] and len(mark) >= len(fence)

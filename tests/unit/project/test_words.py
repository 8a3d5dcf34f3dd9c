"""Prose and names of the project are free of the signs that `tools/words.py` lists."""

from __future__ import annotations

import pytest

from tools import words

CODE = '''"""A module."""

HELD_OUT = 1
"""What is held out."""


def load(path, given):
    """Loads a file. Whether it exists is checked before."""
    # The caller is told.
    raise ValueError("beside the file", "beside")


def path():
    """The path of a file."""


@property
def size():
    """Size in bytes."""
    return load(1, given=2).held
'''


def test_signs_are_found_in_python_files() -> None:
    found = sorted(words.python_findings(CODE))
    assert [line for line, _ in found] == [4, 7, 8, 9, 10, 14, 20, 20]


def test_signs_are_found_in_pages_except_in_code() -> None:
    page = "A page.\n\n```bash\necho told\n```\n\nOf all pages this one is beside. What follows?\n"
    assert [line for line, _ in words.page_findings(page)] == [7, 7, 7]


@pytest.mark.parametrize(
    "text",
    ["Returns what it was.", "Two cases besides this one.", "The offset of a page.", "Whatsapp, Often."],
)
def test_parts_of_words_are_no_signs(text: str) -> None:
    assert list(words.page_findings(text)) == []

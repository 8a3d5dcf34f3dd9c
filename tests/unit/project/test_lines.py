"""Counting of code lines: imports, docstrings, comments and blank lines are left out, everything else counts once."""

from __future__ import annotations

from tools.lines import code_lines

SOURCE = '''"""A docstring
of two lines."""

import os
from a import (
    b,
)


class A:  # a comment beside code counts as code
    """Docstring."""

    x = 1
    """What stands below an attribute is a docstring, too."""
    text = """a value
of two lines"""

    # a comment
    def f(self, one,
          two): return one
'''


def test_only_lines_of_code_are_counted():
    assert code_lines(SOURCE) == 6  # class, x, text (2), def (2)

"""The entry of each core package says what goes in, what comes out, and which file to read first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(path.parent for path in (ROOT / "slimx").glob("*/__init__.py") if path.parent.name != "extras")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_is_introduced_in_few_lines_that_name_files_of_it(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert text is not None
    first, blank, *lines = text.splitlines()
    assert first.endswith(".") and blank == ""
    assert [line.split(":")[0] for line in lines] == ["In", "Out", "Read first"]
    files = re.findall(r"`([\w/]+\.py)`", lines[-1])
    assert files and all((package / file).is_file() for file in files)

"""A test that is marked `slow` or `costly` has the reason in the marker, else no test runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEST = (
    "import pytest\n\n@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.{})])\ndef test_it(n): ...\n"
)
RIGHT = ['slow("full grid")', 'costly("a server of its own")']
WRONG = ["slow", "costly()", 'slow("")', 'costly(" ")', "costly(20)", 'slow("one", "two")', 'slow(why="one")']


def test_markers_without_a_reason_are_refused_where_the_test_is_left_out(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for number, marker in enumerate((*RIGHT, *WRONG)):
        (tmp_path / f"test_{number}.py").write_text(TEST.format(marker))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not costly"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    refused = re.findall(r"^test_(\d)\.py::test_it\[2\]: ", done.stdout, re.MULTILINE)
    assert refused == [str(number) for number in range(len(RIGHT), len(RIGHT) + len(WRONG))]

"""A test whose program is missing is named as skipped on a user's machine and fails in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

@pytest.mark.needs("no-such-program")
def test_draws(): ...

@pytest.mark.needs("sh")
def test_runs(): ...
"""


@pytest.mark.parametrize(
    ("ci", "status", "outcome"), [("true", 1, "1 passed, 1 error"), ("", 0, "1 passed, 1 skipped")]
)
def test_a_missing_program_is_red_in_ci_and_named_elsewhere(tmp_path, ci, status, outcome):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == status
    assert outcome in done.stdout.splitlines()[-1]
    assert "no-such-program" in done.stdout and "`make ci-deps`" in done.stdout

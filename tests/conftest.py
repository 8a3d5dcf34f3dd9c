"""What a test needs of the machine: `@pytest.mark.needs("chromium")` skips it, with the reason, where that is missing.

In CI (CI=true) nothing may be missing, so the test fails there: a skipped test would look like a passed one.
"""

from __future__ import annotations

import os
import shutil

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(program, ...): programs without which the test cannot run")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if shutil.which(program) is None:
                reason = f"needs {program}, which is not on PATH: `make ci-deps` installs it"
                if os.environ.get("CI") == "true":
                    pytest.fail(reason, pytrace=False)
                pytest.skip(reason)

"""The report of a test that has not ended has the Python stack of every process that it started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# The deadline's alarm comes when both children, of which one was forked, are where they hang.
HANGS = """
import os, signal, subprocess, sys

CHILD = '''
import os, signal

def forked_and_waits():
    os.write(1, b"!")
    signal.pause()

def waits():
    os.write(1, b"!")
    signal.pause()

waits() if os.fork() else forked_and_waits()
'''

def test_never_ends():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, process_group=0) as child:
        try:
            assert child.stdout.read(2) == b"!!"
            signal.raise_signal(signal.SIGALRM)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
"""


def test_a_test_that_does_not_end_fails_with_the_stack_of_every_process(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(HANGS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--timeout=1000", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1 and "1 failed" in done.stdout.splitlines()[-1]
    assert "Timeout (>1000.0s)" in done.stdout
    sections = done.stdout.split("--- process ")[1:]
    assert len(sections) == 2
    for function in ("waits", "forked_and_waits"):
        assert sum(f"in {function}\n" in stack for stack in sections) == 1

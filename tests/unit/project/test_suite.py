"""`tools/suite.py` counts the CPU time of tests, fixtures and processes, those that outlive their parents too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools import suite

ROOT = Path(__file__).resolve().parents[3]
BURN = "import time\nuntil = time.process_time() + {seconds}\nwhile time.process_time() < until: pass\n"
MODULE = f"""
import subprocess, sys
import pytest

BURN = {BURN!r}

def burn(seconds):
    exec(BURN.format(seconds=seconds))

@pytest.fixture(scope="module")
def prepared():
    burn(1.0)

def test_with_a_fixture(prepared):
    pass

def test_with_a_child(tmp_path):
    # The child's parent ends first. The child stays until it has been looked at: a busy machine takes its time.
    import time
    burned = tmp_path / "burned"
    waits = f"file, begun = {{str(burned)!r}}, time.time()\\nimport os\\nopen(file, 'w')\\n"
    waits += "while os.path.exists(file) and time.time() < begun + 300: time.sleep(0.1)\\n"
    line = [sys.executable, "-c", BURN.format(seconds=1.0) + waits + "# slimx.engines.server"]
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({{line!r}})"])
    until = time.monotonic() + 300
    while not burned.exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(3)
    burned.unlink()
"""


def test_cpu_seconds_belong_to_the_fixture_the_test_and_the_role(tmp_path: Path) -> None:
    (tmp_path / "test_burning.py").write_text(MODULE)
    written = tmp_path / "tables.json"
    arguments = ["--json", written, "--no-imports", "--", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run([sys.executable, "tools/suite.py", *map(str, arguments)], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout
    tables = json.loads(written.read_text())
    cpu, wall, times = tables["fixture"]["prepared"]
    assert cpu > 0.5 and wall > 0.9 and times == 1
    tests = {name.rpartition("::")[2]: row for name, row in tables["test"].items()}
    assert tests["test_with_a_fixture"][0] >= cpu
    assert tests["test_with_a_child"][0] > 0.5 and tests["test_with_a_child"][1] > 3
    assert tables["role"]["server"][0] > 0.5
    assert tables["cpu"] >= sum(row[0] for row in tables["test"].values())


def test_the_innermost_span_is_what_a_process_did_at_a_moment() -> None:
    events = [
        {"phase": "test", "name": "", "test": "a.py::t", "began": 1.0, "ended": 9.0},
        {"phase": "fixture", "name": "outer", "test": "a.py::t", "began": 2.0, "ended": 6.0},
        {"phase": "fixture", "name": "inner", "test": "a.py::t", "began": 3.0, "ended": 4.0},
        {"phase": "collect", "name": "", "test": "a.py", "began": 0.0, "ended": 0.5},
    ]
    timeline = suite.Timeline(events)
    found = [timeline.at(moment) for moment in (0.2, 0.7, 1.5, 3.5, 5.0, 7.0)]
    fixtures = [("a.py::t", name) for name in ("", "inner", "outer", "")]
    assert found == [("a.py::collection", ""), ("", ""), *fixtures]


def test_imports_are_measured_in_separate_processes() -> None:
    found = suite.import_seconds({"driver": BURN.format(seconds=0.5), "rank": "import no_such_module"})
    assert list(found) == ["driver"] and found["driver"] >= 0.5

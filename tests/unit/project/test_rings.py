"""`tools/rings` divides files into parts, runs sessions side by side, ends all that they start, and keeps results."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration import conftest
from tests.processes import lives, wait_for
from tools.rings import execute as executing
from tools.rings import machine, parts
from tools.rings.execute import execute
from tools.rings.history import UNKNOWN, age, commit
from tools.rings.page import PART_HEAD, RUN_HEAD, last_parts, recorded, rows
from tools.rings.results import RING_ONE, Result, read
from tools.rings.rings import WORKERS, ring_one, ring_two
from tools.rings.sessions import INTERRUPTED, Outcome
from tools.rings.summary import left_out, stale_parts

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "suite.md").read_text()
EMPTY = (
    f"# Suite\n\n{RUN_HEAD}\n| --- | --- | --- | --- | --- |\n\n{PART_HEAD}\n| --- | --- | --- | --- | --- | --- |\n"
)


def result(run: str, date: str, **changed: object) -> Result:
    values = {"commit": "0123456789+", "passed": 5, "failed": 1, "seconds": 60, "load": [1.0, 3.5], "seed": 7}
    return Result(run=run, date=date, factor=1.2, **(values | changed))


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference loop takes no time."""
    monkeypatch.setattr(machine, "LOOPS", 1)


def test_every_file_is_in_one_part_and_parts_are_about_equal() -> None:
    files = parts.test_files(ROOT)
    chosen = [[word for word in ring_two(1, part)[0].command if word.startswith("tests/")] for part in parts.NAMES]
    assert sorted(file for share in chosen for file in share) == files == sorted(set(files))
    assert [word for word in ring_two(1, None)[0].command if word.startswith("tests/")] == files
    assert min(map(len, chosen)) > len(files) / 20


def test_a_file_keeps_its_part_when_others_are_added() -> None:
    """Another hash or salt would mix old and new results of a part."""
    assert parts.part_of("tests/unit/project/test_rings.py") == "1/10"


@pytest.mark.parametrize("part", ["0/10", "11/10", "3/9", "3", "x"])
def test_a_wrong_part_is_one_sentence_and_status_2(part: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tools.rings", "all", "--part", part], cwd=ROOT, capture_output=True)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.decode().splitlines()) == 1 and repr(part) in done.stderr.decode()


def test_ring_one_is_two_sessions_in_one_order() -> None:
    sessions = ring_one(7)
    integration, unit = (session.command for session in sessions)
    assert [session.output is None for session in sessions] == [True, False], "one prints while it runs"
    assert integration[-1] == "tests/integration" and unit[-2:] == ["tests/unit", "tests/extras"]
    assert "--randomly-seed=7" in integration and "--randomly-seed=7" in unit


@pytest.mark.usefixtures("instant")
def test_the_machine_is_measured_while_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "EVERY_S", 0.001)
    with machine.sampled() as samples:
        wait_for(lambda: len(samples) > 3)
    assert not [thread for thread in threading.enumerate() if thread.name == "speed of the machine"]


def test_seconds_on_a_machine_that_changes_are_worth_its_mean_speed() -> None:
    """Half of the time at the reference's speed and half at a third of it: two thirds of the work."""
    assert machine.factor([machine.REFERENCE_S, 3 * machine.REFERENCE_S]) == 1.5


@pytest.mark.usefixtures("instant")
def test_a_run_leaves_one_line_and_its_tests_status(tmp_path: Path) -> None:
    one = Outcome("integration", 1, 9.0, {"a.py": Counter(passed=2, failed=1)}, Counter({"tests/x": 4}))
    two = Outcome("unit", 0, 5.0, {"b.py": Counter(passed=5)}, Counter({"tests/x": 1, "tests/y": 2}))
    path = tmp_path / "suite.jsonl"
    status, lines, outcomes = execute(lambda: [one, two], 7, "make test", path, by_part=False)
    (found,) = read(path)
    assert status == 1 and (found.run, found.passed, found.failed, found.seed) == (RING_ONE, 7, 1, 7)
    assert len(found.load) == 2 and found.commit.rstrip("+") in commit(ROOT)
    assert any("SEED=7" in line for line in lines)
    assert "7" in left_out(outcomes) and "tests/x 5" in left_out(outcomes)


@pytest.mark.usefixtures("instant")
def test_a_whole_ring_two_is_a_result_of_each_part(tmp_path: Path) -> None:
    files = parts.test_files(ROOT)[:40]
    outcome = Outcome("all", 0, 80.0, {file: Counter(passed=1, seconds=2) for file in files})
    path = tmp_path / "suite.jsonl"
    execute(lambda: [outcome], 7, "make test-all", path)
    expected = Counter(map(parts.part_of, files))
    assert {row.run: (row.passed, row.seconds) for row in read(path)} == {k: (n, 2 * n) for k, n in expected.items()}


@pytest.mark.usefixtures("instant")
def test_a_result_is_that_of_the_commit_at_its_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "first"
    monkeypatch.setattr(executing, "commit", lambda root: head)

    def run() -> list[Outcome]:
        nonlocal head
        head = "second"
        return [Outcome("unit", 0, 1.0, {"a.py": Counter(passed=1)})]

    execute(run, 7, "make test", tmp_path / "suite.jsonl", by_part=False)
    assert [row.commit for row in read(tmp_path / "suite.jsonl")] == ["first"]


@pytest.mark.usefixtures("instant")
def test_a_session_without_counts_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    status, lines, _ = execute(lambda: [Outcome("unit", 4, 1.0)], 7, "make test", path, by_part=False)
    assert status == 4 and read(path) == [] and any("status 4" in line for line in lines)


SESSIONS = """
import json, sys
from pathlib import Path
from tools.rings.sessions import Session, run
folder = Path(sys.argv[1])
program = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); print(sys.argv[3]); sys.exit(len(sys.argv[3]) - 3)"
counts = json.dumps({"files": {"a.py": {"passed": 2, "seconds": 1.5}}, "left_out": {"tests": 3}})
def session(name, output):
    path = folder / f"{name}.json"
    return Session(name, [sys.executable, "-c", program, str(path), counts, name], path, output)
for one in run([session("quiet", folder / "output.txt"), session("now", None)]):
    print(one.name, one.status, one.total("passed"), one.left_out["tests"])
"""


def test_sessions_run_side_by_side_and_a_quiet_one_prints_at_the_end(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SESSIONS, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["now", "", "quiet", "", "quiet 2 2 3", "now 0 2 3", ""], done.stderr


SESSION = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""
RUNNER = f"""
import sys
from pathlib import Path
from tools.rings.sessions import INTERRUPTED, Session, run
try:
    run([Session("one", [sys.executable, "-c", {SESSION!r}], Path(sys.argv[1]))])
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_what_sessions_started_outside_of_their_group_too(tmp_path: Path, signum: int) -> None:
    command = [sys.executable, "-c", RUNNER, str(tmp_path / "counts.json")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    sleeper = psutil.Process(int(process.stdout.readline()))
    started = [sleeper, *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signum)
    assert process.wait(60) == INTERRUPTED and len(started) == 3
    wait_for(lambda: not any(map(lives, started)), 60)


def test_a_record_adds_what_is_new_once_and_keeps_ten_runs() -> None:
    runs = [result(RING_ONE, f"2026-11-{day:02}T01:02:03Z") for day in range(1, 13)]
    old, new = result("3/10", "2026-11-01T00:00:00Z"), result("3/10", "2026-11-02T00:00:00Z", passed=9)
    page = recorded(EMPTY, [*runs, new, old])
    assert [row[0] for row in rows(page, RUN_HEAD)] == [run.date for run in runs[2:]]
    found = {row[0]: row[1:] for row in rows(page, PART_HEAD)}
    assert list(found) == list(parts.NAMES)
    assert found["3/10"] == [new.date, new.commit, "9", "1", "60"] and found["4/10"][0] == "never"
    assert recorded(page, [*runs, new, old]) == page == recorded(page, [])
    later = result("4/10", "2026-11-03T00:00:00Z")
    assert last_parts(page, [later]).keys() == {"3/10", "4/10"}


def test_the_page_has_both_tables_and_is_as_a_record_leaves_it() -> None:
    assert recorded(PAGE, []) == PAGE


def git(directory: Path, *arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=directory, check=True, capture_output=True)


def test_a_part_is_stale_by_commits_and_unknown_where_git_cannot_say(tmp_path: Path) -> None:
    assert commit(tmp_path) == UNKNOWN and age(tmp_path, "0123456789") is None
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    first = commit(tmp_path)
    git(tmp_path, "commit", "--allow-empty", "-m", "second")
    assert age(tmp_path, f"{first}+") == 1 and age(tmp_path, commit(tmp_path)) == 0
    (tmp_path / "new").touch()
    assert commit(tmp_path).endswith("+") and age(tmp_path, UNKNOWN) is None
    last = {"1/10": ["1/10", "", first], "2/10": ["2/10", "", "0123456789"]}
    line = stale_parts(tmp_path, last)
    assert "1/10 (" not in line and "2/10 (unknown)" in line and "3/10 (never)" in line


TESTS = """
import pytest

def test_passes(): ...

def test_fails(): raise ValueError

@pytest.mark.slow
@pytest.mark.parametrize("case", range(3))
def test_slow(case): ...
"""


def counted(root: Path) -> dict[str, Any]:
    """Returns the counts of the failed session of `root`/tests on two workers."""
    (root / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    counts = root / "counts.json"
    options = ["-p", "tools.rings.counting", f"--counts={counts}", *WORKERS, "2", "--rootdir", str(root)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 1, done.stdout
    return json.loads(counts.read_text())


def test_a_session_counts_by_file_and_what_it_deselects(tmp_path: Path) -> None:
    """By way of two workers, which get one seed: with two orders pytest-xdist would refuse to run."""
    (tmp_path / "tests").mkdir()
    for name in ("one", "two"):
        (tmp_path / "tests" / f"test_{name}.py").write_text(TESTS)
    found = counted(tmp_path)
    assert found["left_out"] == {"tests": 6}
    shown = {file: (row["passed"], row["failed"]) for file, row in found["files"].items()}
    assert shown == {"tests/test_one.py": (1, 1), "tests/test_two.py": (1, 1)}


def test_a_dead_worker_fails_the_tests_that_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for number in range(6):
        text = "import os\n\ndef test_dies(): os._exit(9)\n\ndef test_after(): ...\n"
        (tmp_path / "tests" / f"test_{number}.py").write_text(text)
    files = counted(tmp_path)["files"]
    assert len(files) == 6 and sum(row.get("passed", 0) + row["failed"] for row in files.values()) == 12
    assert all(row["failed"] for row in files.values())


def test_a_seed_repeats_an_order_in_which_files_of_whole_runs_are_first(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    sorting = inspect.getsource(conftest.pytest_collection_modifyitems)
    (tmp_path / "conftest.py").write_text(f"import pytest\n\nSTARTERS = {conftest.STARTERS}\n\n{sorting}")
    for name in "abcdef":
        text = "TrainProcess = None\n" if name in "ef" else ""
        (tmp_path / f"test_{name}.py").write_text(text + "def test_one(): ...\ndef test_two(): ...\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    started = [
        subprocess.Popen([*command, f"--randomly-seed={seed}"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for seed in (1, 1, 3000000000)
    ]
    first, again, other = (
        [line for line in process.communicate()[0].splitlines() if "::" in line] for process in started
    )
    assert first == again != other and len(first) == 12 and set(first) == set(other)
    for order in (first, other):
        assert {line.partition("::")[0] for line in order[:4]} == {"test_e.py", "test_f.py"}

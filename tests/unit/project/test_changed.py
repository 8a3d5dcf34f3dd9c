"""`make test-changed` runs the tests that a change can reach, nearest first, and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.changed.__main__ import reached
from tools.changed.graph import Graph

ROOT = Path(__file__).parents[3]
FILES = {
    "slimx/__init__.py": '_EXPORTS = {"train": "slimx.high"}',
    "slimx/low.py": 'WHY = "see docs/apart.md"',
    "slimx/middle.py": "def late():\n    from slimx import low",
    "slimx/high.py": "from .middle import late",
    "slimx/hook.py": "",
    "slimx/configured.py": "",
    "slimx/library.py": '"""Loads slimx.apart, docs/apart.md."""',
    "slimx/page.py": 'PAGE = "page.html"',
    "slimx/page.html": "",
    "csrc/kernel.h": "",
    "configs/run.yaml": "reward: slimx.configured.reward",
    "configs/other.yaml": "",
    "docs/apart.md": "",
    "benchmarks/figures.py": "",
    "benchmarks/loop.py": "import figures",
    "tests/__init__.py": "",
    "tests/conftest.py": """
import pytest
from slimx.apart import value
from tests import hooked, prepared

def pytest_configure():
    hooked.install()

def used():
    return prepared.thing()

@pytest.fixture
def thing(again):
    return used()

@pytest.fixture
def again():
    return value
""",
    "tests/hooked.py": "",
    "tests/prepared.py": "",
    "slimx/apart.py": "",
    "tests/unit/test_bench.py": 'C = ["python", "benchmarks/loop.py", "--rounds=1"]',
    "tests/unit/test_fixture.py": "def test_thing(thing): ...",
    "tests/unit/test_high.py": "import slimx.high",
    "tests/unit/test_kernel.py": "from slimx.library import load",
    "tests/unit/test_low.py": "from slimx import low",
    "tests/unit/test_page.py": "from slimx import page\nROOT = 1\nP = ROOT / 'docs' / f'{page}.md'",
    "tests/unit/test_program.py": 'C = ["-c", "from slimx import middle"]',
    "tests/unit/test_string.py": 'def test_it(tmp_path):\n    x = ["reward=slimx.hook.reward", tmp_path / "docs"]',
    "tests/unit/test_unrelated.py": '"""See slimx.low and configs/run.yaml."""\nimport slimx\nslimx.__version__',
    "tests/unit/test_yaml.py": 'ROOT = 1\nC = ROOT / "configs" / "run.yaml"',
}
TESTS = [Path(file).stem.removeprefix("test_") for file in FILES if "/test_" in file]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    return tmp_path


def names(tests: dict[str, int]) -> list[str]:
    return [Path(test).stem.removeprefix("test_") for test in tests]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("slimx/low.py", ["low", "program", "high"]),  # by one import, a program and two, three imports
        ("slimx/hook.py", ["string"]),
        (
            "slimx/__init__.py",
            [*(test for test in TESTS if test not in ("bench", "fixture", "yaml")), "yaml", "fixture"],
        ),
        ("slimx/library.py", ["kernel"]),
        ("csrc/kernel.h", ["kernel"]),
        ("configs/run.yaml", ["yaml"]),
        ("configs/other.yaml", []),
        ("slimx/configured.py", ["yaml"]),
        ("slimx/page.html", ["page"]),
        ("docs/apart.md", ["page"]),
        ("benchmarks/figures.py", ["bench"]),
        ("tests/prepared.py", ["fixture"]),
        ("slimx/apart.py", ["fixture"]),
        ("tests/hooked.py", TESTS),
        ("tests/conftest.py", TESTS),
        ("tests/unit/test_unrelated.py", ["unrelated"]),
    ],
)
def test_a_file_reaches_what_imports_or_names_it(root: Path, changed: str, tests: list[str]) -> None:
    assert names(Graph(root, FILES).distances([changed])) == tests


def git(root: Path, *arguments: str) -> None:
    user = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *user, *arguments], cwd=root, check=True, capture_output=True)


def test_edited_deleted_and_new_files_are_the_change(root: Path) -> None:
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "--message=first")
    assert reached(root, "HEAD") == (set(), {})
    (root / "slimx/hook.py").unlink()
    (root / "configs/run.yaml").write_text("")
    (root / "tests/unit/test_new.py").write_text("an edit that is not finished yet (")
    changed, tests = reached(root, "HEAD")
    assert changed == {"slimx/hook.py", "configs/run.yaml", "tests/unit/test_new.py"}
    assert names(tests) == ["new", "string", "yaml"]
    git(root, "add", ".")
    git(root, "commit", "--message=second")
    assert reached(root, "HEAD") == (set(), {})
    assert reached(root, "HEAD~") == (changed, tests)


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.changed", *arguments]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_nearest_tests_run_first_and_slow_ones_too(root: Path) -> None:
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "--message=first")
    for change, answer in ((None, "No file differs"), ("configs/other.yaml", "No test depends")):
        if change:
            (root / change).write_text("x: 1\n")
        done = run(root)
        assert done.returncode == 0 and done.stdout.startswith(answer) and done.stdout.count("\n") == 1, done.stderr
    slow = "import pytest\n@pytest.mark.slow('why')\ndef test_slow(): assert False\ndef test_last(): ..."
    (root / "tests/conftest.py").write_text("def pytest_collection_modifyitems(items): items.reverse()")
    (root / "tests/unit/test_low.py").write_text(f"from slimx import low\n{slow}\n")
    (root / "tests/unit/test_high.py").write_text("import slimx.high\ndef test_high(): ...\n")
    (root / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\n")
    git(root, "add", ".")
    git(root, "commit", "--message=second")
    (root / "slimx/low.py").write_text("# changed\n")
    done = run(root, "--", "-v", "-p", "no:cacheprovider", "-p", "no:randomly", "-x")
    (reached,) = (line for line in done.stdout.splitlines() if line.startswith("reached: "))
    assert re.findall(r"\d+", reached) == ["2", "1"], done.stdout + done.stderr
    ran = [line.split()[0].rpartition("::")[2] for line in done.stdout.splitlines() if line.endswith("%]")]
    assert done.returncode == 1 and ran == ["test_last", "test_slow"], done.stdout

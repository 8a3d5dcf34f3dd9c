"""`make gpu` without a GPU: every test of one can be collected on a bare machine, and no step ends or hides another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.gpu import bare, check, library
from tools.gpu.check import Step, on_gpu, prepared, run, take, without_gpu
from tools.steps import ROOT, Failed, LeftOut, Steps

FILES = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


def step(program: str, name: str = "one", seconds: float = 60, **values: object) -> Step:
    return Step(name, (sys.executable, "-c", program), seconds, **values)


def test_gpu_tests_are_collected_with_their_requirements_alone(tmp_path: Path) -> None:
    collection = without_gpu(no_trainer="")[0]
    found = take(collection, tmp_path / "output.txt", 120, dict(os.environ))
    assert int(found.split()[0]) >= 171
    collected = (tmp_path / "output.txt").read_text()
    asking_first = {"test_direct.py", "test_nvml.py"}  # whole files, skipped where a package is missing
    assert [name for name in FILES if f"tests/gpu/{name}::" not in collected and name not in asking_first] == []


def test_a_test_of_a_gpu_that_imports_more_is_not_collected(tmp_path: Path) -> None:
    packages = ("pydantic", "msgspec", "megatron.core", "psutil")
    for number, package in enumerate(packages):
        (tmp_path / f"test_{number}.py").write_text(f"import {package}\ndef test_one(): pass\n")
    command = [sys.executable, "-m", "tools.gpu.bare", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert all(f"No module named '{package.split('.')[0]}'" in done.stdout for package in packages)


def test_required_packages_include_only_their_requirements() -> None:
    needed = bare.required(check.NEEDED)
    assert {"numpy", "torch", "pytest", "setuptools", "pluggy", "typing-extensions"} <= needed
    assert not needed & {"pydantic", "ray", "sglang", "no-such-package"}
    hidden = bare.hidden(needed)
    assert {"pydantic", "ray", "sglang", "megatron"} <= hidden
    assert not hidden & {"numpy", "torch", "_pytest", "slimx", "tests", "tools", "json"}


def test_every_test_file_has_a_step(tmp_path: Path) -> None:
    commands = [step.command[-1] for step in on_gpu(tmp_path, quick=False, no_trainer=None)]
    assert sorted(Path(last).name for last in commands if last.startswith("tests/gpu/")) == FILES
    assert Path(commands[-1]).name == "test_sanitizer.py"


def test_an_unlisted_gpu_test_file_gets_a_step(tmp_path: Path) -> None:
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    for name in ("sanitizer", "new", "pack"):
        (tmp_path / "tests" / "gpu" / f"test_{name}.py").touch()
    assert check.test_names(tmp_path) == ["pack", "new", "sanitizer"]


def test_the_quick_steps_are_among_all_steps(tmp_path: Path) -> None:
    quick = {step.name for step in on_gpu(tmp_path, quick=True, no_trainer=None)}
    every = {step.name for step in on_gpu(tmp_path, quick=False, no_trainer=None)}
    assert quick < every


def test_without_packages_the_trainer_alone_is_left_out(tmp_path: Path) -> None:
    steps = on_gpu(tmp_path, quick=False, no_trainer="no megatron-core")
    left_out = {step.name for step in steps if step.left_out}
    assert left_out == {"tests of trainer", "tests of exact_trainer", "benchmark of the trainer"}


def test_packages_that_are_installed_are_not_unpacked(tmp_path: Path) -> None:
    unpack = prepared(tmp_path / "site", tmp_path / "none", dry_run=True)[0]
    assert unpack.left_out is not None


def test_every_step_is_taken_and_all_that_it_prints_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken, output = Steps("title", tmp_path / "check.md"), tmp_path / "output.txt"
    steps = [
        step("print('x' * 9000); raise SystemExit('bad')", "fails"),
        step("", "waits", needs=("fails",)),
        step("", "absent", left_out="no package"),
        step("print('y' * 9000); print('good')", "passes"),
    ]
    run(steps, taken, output, time.monotonic() + 60, dict(os.environ))
    assert [(outcome.name, outcome.state) for outcome in taken.outcomes] == [
        ("fails", "FAILED"),
        ("waits", "left out"),
        ("absent", "left out"),
        ("passes", "ok"),
    ]
    printed, kept = capsys.readouterr().out, output.read_text()
    assert 2900 < printed.count("x") <= check.TAIL and "y" * 100 not in printed
    assert kept.count("x") >= 9000 and kept.count("y") >= 9000


def test_no_step_takes_more_than_what_is_left(tmp_path: Path) -> None:
    output, began = tmp_path / "output.txt", time.monotonic()
    with pytest.raises(Failed):
        take(step("import time; print('begun', flush=True); time.sleep(3000)"), output, 20, dict(os.environ))
    assert time.monotonic() - began < 600 and "begun" in output.read_text()
    with pytest.raises(Failed):
        take(step(""), output, -1, dict(os.environ))
    with pytest.raises(LeftOut):
        take(step("", left_out="no package"), output, -1, dict(os.environ))


def test_libraries_are_up_to_date_until_they_or_their_sources_change(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    built = tmp_path / "slimx" / "_lib"
    built.mkdir(parents=True)
    for path in (tmp_path / "setup.py", tmp_path / "csrc" / "one.cu", built / library.CUDA_LIBRARY):
        path.write_text("1")
    assert not library.up_to_date(tmp_path)
    library.write_stamp(tmp_path)
    assert library.up_to_date(tmp_path)
    for path in (tmp_path / "csrc" / "one.cu", built / library.CUDA_LIBRARY):
        path.write_text("2")
        assert not library.up_to_date(tmp_path)
        path.write_text("1")
    assert library.up_to_date(tmp_path)
    (built / library.CUDA_LIBRARY).unlink()
    library.write_stamp(tmp_path)
    assert not library.up_to_date(tmp_path)


def test_unpacked_packages_are_found_by_every_step_only(tmp_path: Path) -> None:
    for site in (tmp_path, None):
        paths = check.variables(site)["PYTHONPATH"].split(os.pathsep)
        assert paths[0] == str(ROOT) and (str(tmp_path) in paths) == (site is not None)

"""`slimx setup` installs a lock in the tested order, and refuses environments that cannot take it before it begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimx.errors import SlimxError
from slimx.extras.install import command, packages
from slimx.extras.install.packages import LOCKS, Installation, cpu_index

CPU = Installation("cpu", LOCKS / "cpu.txt")
CUDA = Installation("cu130", LOCKS / "cu130.txt")
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes this Python appear to run in an empty virtual environment."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(command, "cuda_home", lambda environment: Path("/cuda"))
    return tmp_path


def test_a_virtual_environment_takes_both_locks(environment: Path) -> None:
    command.check(CPU, system=False)
    command.check(CUDA, system=False)


@pytest.mark.parametrize(
    ("installation", "code", "name", "value"),
    [
        (CPU, "setup.python", "sys.version_info", (3, 13, 0)),
        (CPU, "setup.environment", "sys.prefix", sys.base_prefix),
        (CUDA, "setup.cuda_home", "slimx.extras.install.command.cuda_home", lambda environment: None),
        (CPU, "setup.no_pip", "importlib.util.find_spec", lambda name: None),
        (CPU, "setup.disk", "shutil.disk_usage", lambda path: SimpleNamespace(free=1e9)),
    ],
    ids=["python", "environment", "toolkit", "pip", "disk"],
)
def test_an_environment_that_cannot_take_the_lock_is_refused(
    environment: Path, monkeypatch: pytest.MonkeyPatch, installation: Installation, code: str, name: str, value: object
) -> None:
    monkeypatch.setattr(name, value)
    with pytest.raises(SlimxError) as refusal:
        command.check(installation, system=False)
    assert refusal.value.code == code


def test_an_environment_with_another_lock_is_refused(environment: Path) -> None:
    packages.stamp("cpu").touch()
    command.check(CPU, system=False)
    with pytest.raises(SlimxError) as refusal:
        command.check(CUDA, system=False)
    assert (refusal.value.code, refusal.value.about) == ("setup.other_lock", "cpu")


def test_any_environment_is_taken_with_the_option(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    command.check(CPU, system=True)


@pytest.mark.parametrize(
    ("installation", "driver", "expected"),
    [
        (CPU, False, packages.TORCH_CPU_INDEX),
        (CPU, True, ""),
        (CUDA, False, ""),
        (Installation("cpu", CPU.file, torch_index="https://own"), False, ""),
        (Installation("cpu", CPU.file, torch_cpu_index=""), False, ""),
    ],
    ids=["cpu", "a GPU", "cu130", "own index", "none"],
)
def test_the_index_of_cpu_builds_is_for_machines_without_a_gpu(
    tmp_path: Path, installation: Installation, driver: bool, expected: str
) -> None:
    file = tmp_path / "nvidiactl"
    if driver:
        file.touch()
    assert cpu_index(installation, file) == expected


def test_packages_are_installed_in_the_order_that_they_need(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch first, then the lock without what compiles against it, then that, then the libraries of a CUDA build."""
    file = environment / "lock.txt"
    file.write_text("# why\na==1 --hash=x\ntorch==2 --hash=y\ntransformer-engine-torch==3 --hash=z\n")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(packages, "_pip", lambda *words, **settings: calls.append(words))
    monkeypatch.setattr(packages, "_asks_for_cuda", lambda: True)
    packages.install(Installation("cu130", file, torch_index="https://own"))
    wheels = environment / "wheels.txt"
    hashed = ("--no-deps", "--require-hashes", "-r")
    assert calls == [
        ("--no-deps", "--index-url", "https://own", "torch==2"),
        (*hashed, str(wheels)),
        ("--no-deps", "--no-build-isolation", "--require-hashes", "-r", str(file)),
        (*hashed, str(LOCKS / "cpu-cuda.txt")),
        ("--no-warn-conflicts", "torch==2"),
    ]
    assert "transformer-engine-torch" not in wheels.read_text() and "a==1 --hash=x" in wheels.read_text()
    assert packages.stamp("cu130").exists()

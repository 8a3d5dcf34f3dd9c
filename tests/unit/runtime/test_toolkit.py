"""Processes are told of the CUDA toolkit that is there, in a fixed order of places."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimx.runtime import toolkit
from slimx.runtime.toolkit import WHEEL, cuda_home, set_cuda_home


def compiler(home: Path) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch(mode=0o755)
    return home


def toolkit_in(home: Path) -> Path:
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so").touch()
    return compiler(home)


def test_a_toolkit_is_the_one_that_is_named_else_the_paths_else_the_usual_else_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, packages = tmp_path / "usual", tmp_path / "packages"
    monkeypatch.setattr(toolkit, "USUAL", usual)
    bare = {"PATH": str(tmp_path)}
    assert cuda_home(bare, packages) is None
    wheel = compiler(packages / WHEEL)
    assert cuda_home(bare, packages) == wheel
    toolkit_in(usual)
    assert cuda_home(bare, packages) == usual
    script = compiler(tmp_path / "script")  # it starts the usual place's
    assert cuda_home({"PATH": str(script / "bin")}, packages) == usual
    other = toolkit_in(tmp_path / "other")
    assert cuda_home({"PATH": str(other / "bin")}, packages) == other
    assert cuda_home({"PATH": str(other / "bin"), "CUDA_HOME": "/named"}, packages) == Path("/named")
    assert cuda_home(bare | {"CUDA_PATH": "/named"}, packages) == Path("/named")


def test_the_variable_is_set_where_the_wheel_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "USUAL", tmp_path / "usual")
    environment = {"PATH": str(tmp_path)}
    set_cuda_home(environment, tmp_path)
    assert environment == {"PATH": str(tmp_path)}
    wheel = compiler(tmp_path / WHEEL)
    set_cuda_home(environment, tmp_path)
    assert environment["CUDA_HOME"] == str(wheel)
    environment["CUDA_HOME"] = "/named"
    set_cuda_home(environment, tmp_path)
    assert environment["CUDA_HOME"] == "/named"

"""Processes get the path of the installed CUDA toolkit, from a fixed order of places."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slimx.runtime import toolkit
from slimx.runtime.toolkit import WHEEL, cuda_home, link_error, set_build_tools
from tests.needed import missing
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
NEEDED = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm", "nvidia-cuda-runtime")


def compiler(home: Path) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch(mode=0o755)
    return home


def toolkit_in(home: Path) -> Path:
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so").touch()
    return compiler(home)


def wheels_in(packages: Path) -> Path:
    """Writes files as the wheels have them: no lib64, and no library under a name that linkers look for."""
    wheel = compiler(packages / WHEEL)
    for name in ("include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudart_static.a"):
        (wheel / name).parent.mkdir(parents=True, exist_ok=True)
        (wheel / name).write_text(name)
    return wheel


def empty_library(file: Path) -> None:
    subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", "-o", file], check=True)


def test_a_toolkit_is_the_named_one_else_the_paths_or_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, packages = tmp_path / "usual", tmp_path / "packages"
    monkeypatch.setattr(toolkit, "USUAL", usual)
    bare = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert cuda_home(bare, packages) is None
    wheel = wheels_in(packages)
    assert (cuda_home(bare, packages) / "bin").samefile(wheel / "bin")
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
    bare = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = dict(bare)
    set_build_tools(environment, tmp_path)
    assert environment == bare
    wheels_in(tmp_path)
    set_build_tools(environment, tmp_path)
    assert environment["CUDA_HOME"] == str(cuda_home(bare, tmp_path))
    environment["CUDA_HOME"] = "/named"
    set_build_tools(environment, tmp_path)
    assert environment["CUDA_HOME"] == "/named"


def test_ninja_is_found_in_an_environment_that_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "USUAL", tmp_path / "usual")
    programs, system = tmp_path / "environment", tmp_path / "system"
    for place in (programs, system):
        place.mkdir()

    def path(before: str) -> str:
        environment = {"PATH": before}
        set_build_tools(environment, tmp_path, programs)
        return environment["PATH"]

    assert path(str(system)) == str(system), "there is none"
    (programs / "ninja").touch(mode=0o755)
    assert path(str(system)) == f"{system}{os.pathsep}{programs}"
    assert path("") == str(programs)
    (system / "ninja").touch(mode=0o755)
    assert path(str(system)) == str(system)


def test_wheels_get_the_layout_and_the_names_of_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "USUAL", tmp_path / "usual")
    wheel, driver = wheels_in(tmp_path / "packages"), tmp_path / "driver" / "libcuda.so.1"
    driver.parent.mkdir()
    driver.touch()
    bare = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), "LD_LIBRARY_PATH": f":{driver.parent}"}
    with ThreadPoolExecutor(8) as starting:  # as the processes of a node
        (home,) = set(starting.map(lambda _: cuda_home(bare, tmp_path / "packages"), range(32)))
    assert os.listdir(tmp_path / "cache" / "slimx") == [home.name]
    for name, target in {
        "bin/nvcc": wheel / "bin/nvcc",
        "include/cuda_runtime.h": wheel / "include/cuda_runtime.h",
        "nvvm/bin/cicc": wheel / "nvvm/bin/cicc",
        "lib64/libcudart.so": wheel / "lib/libcudart.so.13",
        "lib64/libcudart.so.13": wheel / "lib/libcudart.so.13",
        "lib64/libcudart_static.a": wheel / "lib/libcudart_static.a",
        "lib64/stubs/libcuda.so": driver,
    }.items():
        assert (home / name).samefile(target)
    (wheel / "lib" / "libcublas.so.13").touch()  # installed later
    more = cuda_home(bare, tmp_path / "packages")
    assert more != home and (more / "lib64" / "libcublas.so").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "USUAL", tmp_path / "usual")
    wheels_in(tmp_path)
    (tmp_path / "cache").touch()
    with refused("toolkit.cache", about=str(tmp_path / "cache" / "slimx")):
        cuda_home({"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}, tmp_path)


def test_a_toolkit_whose_library_is_absent_links_nothing(tmp_path: Path) -> None:
    nvcc = compiler(tmp_path) / "bin" / "nvcc"
    assert str(nvcc) in link_error(tmp_path, driver=False)  # it cannot be run
    nvcc.write_text('#!/bin/sh\nfor last; do :; done\necho "void run() {}" | c++ -x c++ -fPIC -c - -o "$last"\n')
    assert "-lcudart" in link_error(tmp_path, driver=False)
    (tmp_path / "lib64").mkdir()
    empty_library(tmp_path / "lib64" / "libcudart.so")
    assert link_error(tmp_path, driver=False) is None
    assert "-lcuda" in link_error(tmp_path, driver=True)
    (tmp_path / "lib64" / "stubs").mkdir()
    empty_library(tmp_path / "lib64" / "stubs" / "libcuda.so")
    assert link_error(tmp_path, driver=True) is None


@pytest.mark.slow("installs CUDA's wheels and compiles")
def test_sglang_makes_its_kernels_where_cuda_comes_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "USUAL", tmp_path / "usual")
    lock = (ROOT / "requirements" / "cu130.txt").read_text()
    pins = [re.search(rf"^{name}==[^\s]+", lock, re.MULTILINE).group() for name in NEEDED]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "packages", *pins]
    if subprocess.run(install).returncode:
        missing("needs the wheels of requirements/cu130.txt, which pip does not get here")
    empty_library(tmp_path / "libcuda.so.1")  # as the driver's, which brings it
    bare = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), "LD_LIBRARY_PATH": str(tmp_path)}
    assert link_error(tmp_path / "packages" / WHEEL, driver=False) is not None
    home = cuda_home(bare, tmp_path / "packages")
    assert link_error(home, driver=True) is None
    program = (
        "import torch\n"
        "from sglang.kernels.jit.utils.arch import override_jit_cuda_arch\n"
        "from sglang.kernels.ops.activation.activation import activation_module\n"
        "with override_jit_cuda_arch(9, 0):\n"
        "    activation_module(torch.bfloat16)\n"
    )
    jit = {"CUDA_HOME": str(home), "SGLANG_JIT_CACHE_DIR": str(tmp_path / "jit")}
    subprocess.run([sys.executable, "-c", program], env=os.environ | jit, check=True)

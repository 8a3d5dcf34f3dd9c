"""The native libraries compile without a warning, the CUDA library for every architecture that it is shipped for and
without a kernel that spills registers.

The CUDA part where nvcc is, which CI need not have. It runs nothing: `make gpu` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.gpu.library import up_to_date

ROOT = Path(__file__).parents[3]
PATH = f"{os.environ['PATH']}:/usr/local/cuda/bin"
ARCHITECTURES = {"sm_90", "sm_100"}
KERNELS = {
    **{"pack": r"7reshardILNS_6KernelE0EE", "checksum": r"7reshardILNS_6KernelE1EE", "scales": "13triton_scales"},
    "int4": r"10int4_roundI",
    **{name: rf"\d+exact_{name}I" for name in ("linear", "rms_norm", "silu_and_mul", "log_normalizer", "attend")},
}
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'(.*?)Compile time", re.S)
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

nvcc_needed = pytest.mark.skipif(
    shutil.which("nvcc", path=PATH) is None,
    reason="there is no nvcc: install CUDA 12.8 or later to compile the CUDA kernels",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns the CUDA library of weights and the output of the compilers of all CUDA libraries.

    They are those of `make build` where these are up to date: compiling takes most of a minute of both cores."""
    checkout = ROOT
    if not (up_to_date(ROOT) and compiled(ROOT)):
        checkout = copy_of_sources(tmp_path_factory.mktemp("checkout"))
        build(checkout, "1", "build_ext", "--inplace")
    return checkout / "slimx" / "_lib" / "libslimx_cuda.so", compiled(checkout)


def compiled(checkout: Path) -> str:
    """Returns the output of the compilers of all CUDA libraries, "" if there was no build."""
    return "".join(log.read_text() for log in sorted((checkout / "build" / "compiler").glob("*_cuda.log")))


def copy_of_sources(folder: Path) -> Path:
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "slimx").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "slimx/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(checkout: Path, cuda: str, *command: str) -> str:
    compiler = checkout / "no-compiler"  # of the CPU library, which is not what is tested
    compiler.write_text('#!/bin/sh\nfor target; do :; done\ntouch "$target"\n')
    compiler.chmod(0o755)
    environment = {"PATH": PATH, "SLIMX_CUDA": cuda, "CXX": str(compiler)}
    arguments = [sys.executable, "setup.py", *command]
    done = subprocess.run(arguments, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("source", ["reshard_cpu.cpp", "delta_cpu.cpp", "exact_cpu.cpp", "int4_cpu.cpp"])
@pytest.mark.parametrize(
    "stage",
    ["-fsyntax-only", pytest.param("-S", marks=pytest.mark.slow("warnings of the optimizer: seconds of a core"))],
)
def test_the_cpu_libraries_compile_without_a_warning(source: str, stage: str) -> None:
    flags = [
        "-O2",
        "-std=c++17",
        "-fopenmp",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        stage,
        "-o",
        "/dev/null",
    ]
    command = ["g++", *flags, ROOT / "csrc" / source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@nvcc_needed
def test_the_cuda_libraries_compile_without_a_warning(built: tuple[Path, str]) -> None:
    assert not [line for line in built[1].splitlines() if "warning" in line.lower()]


@nvcc_needed
def test_no_kernel_spills_on_any_architecture(built: tuple[Path, str]) -> None:
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for name, architecture, text in ENTRY.findall(built[1]):
        kernel = next((k for k, pattern in KERNELS.items() if re.search(pattern, name)), name)
        found.setdefault((kernel, architecture), set()).add(SPILLS.search(text).groups())
    assert set(found) == {(kernel, architecture) for kernel in KERNELS for architecture in ARCHITECTURES}
    assert set.union(*found.values()) == {("0", "0", "0")}, found


@nvcc_needed
def test_the_library_exports_its_interface_and_nothing_else(built: tuple[Path, str]) -> None:
    for suffix, header in (("", "interface.cuh"), ("_exact", "exact_interface.cuh"), ("_int4", "int4_interface.cuh")):
        library = built[0].with_name(f"libslimx{suffix}_cuda.so")
        listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
        declared = re.findall(r"^[\w ]+?[ *]+(slimx_\w*cuda\w*)\(", (ROOT / "csrc" / header).read_text(), re.M)
        assert {line.split()[-1] for line in listed.stdout.splitlines()} == set(declared)


@nvcc_needed
def test_the_library_holds_code_for_every_architecture_and_ptx(built: tuple[Path, str]) -> None:
    program = shutil.which("cuobjdump")
    if program is None:
        pytest.skip("there is no cuobjdump to list what the library holds")
    for kind, expected in (("--list-elf", ARCHITECTURES), ("--list-ptx", {"sm_100"})):
        output = subprocess.run([program, kind, built[0]], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"sm_\d+", output)) == expected, output


@nvcc_needed
def test_a_build_without_cuda_leaves_no_cuda_library_of_an_earlier_one(built: tuple[Path, str], tmp_path: Path) -> None:
    checkout = copy_of_sources(tmp_path)
    (checkout / "slimx" / "_lib").mkdir()
    shutil.copy(built[0], checkout / "slimx" / "_lib")
    stale = checkout / "build" / "lib.linux-x86_64-cpython-311" / "slimx" / "_lib"
    stale.mkdir(parents=True)
    shutil.copy(built[0], stale)
    build(checkout, "0", "bdist_wheel")
    with zipfile.ZipFile(next((checkout / "dist").glob("*.whl"))) as wheel:
        libraries = [name for name in wheel.namelist() if name.endswith(".so")]
    build(checkout, "0", "build_ext", "--inplace")
    expected = ["libslimx_cpu.so", "libslimx_exact.so", "libslimx_int4.so"]
    assert sorted(p.name for p in (checkout / "slimx" / "_lib").iterdir()) == expected
    assert sorted(libraries) == [f"slimx/_lib/{name}" for name in expected]


def test_a_required_cuda_that_is_missing_is_refused(tmp_path: Path) -> None:
    checkout = copy_of_sources(tmp_path)
    for value, path, named in (("1", "/nowhere", "nvcc"), ("2", "", "'2'")):
        text = (checkout / "setup.py").read_text().replace("/usr/local/cuda", "/nowhere")
        (checkout / "setup.py").write_text(text)
        environment = {"PATH": path, "SLIMX_CUDA": value}
        arguments = [sys.executable, "setup.py", "--version"]
        done = subprocess.run(arguments, cwd=checkout, env=environment, capture_output=True, text=True)
        message = done.stderr.splitlines()[-1]
        assert done.returncode and "SLIMX_CUDA" in message and named in message, done.stderr

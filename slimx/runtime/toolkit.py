"""The CUDA toolkit that compiles kernels at run time: where it is installed, and the environment variables that point
libraries to it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from slimx.errors import SlimxError
from slimx.runtime.logs import how_ended

NVSHMEM = {"NVSHMEM_DISABLE_NCCL": "1"}
"""Environment variables for NVSHMEM, which DeepEP's kernels use between nodes. Without them NVSHMEM creates NCCL
communicators, which DeepEP does not need, in the memory of every GPU."""

USUAL = Path("/usr/local/cuda")
WHEEL = "nvidia/cu13"
"""Directory in site-packages into which the CUDA wheels of the lock file install their files."""
RUNTIME = "lib64/libcudart.so"
"""Path of the CUDA runtime library, with which kernels of SGLang and flashinfer are linked, relative to the toolkit's
directory."""
PROGRAM = "#include <cuda_runtime.h>\n__global__ void one(int* x) { *x = 1; }\nvoid run(int* x) { one<<<1, 1>>>(x); }\n"


def cuda_home(environment: Mapping[str, str], packages: Path | None = None) -> Path | None:
    """Returns the directory of the CUDA toolkit, or None if there is none.

    The candidates are, in this order: CUDA_HOME, CUDA_PATH, the toolkit of the nvcc on PATH, the usual location, and
    the lock file's wheels in `packages` (default: site-packages of this Python). An nvcc on PATH may be a script that
    starts another nvcc, so a directory counts as a toolkit only if it also contains libraries. Linkers do not find the
    wheels' libraries by their file names, so `wheel_home` creates a directory of links to them."""
    configured = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if configured:
        return Path(configured)
    compiler = shutil.which("nvcc", path=environment.get("PATH"))
    on_path = Path(compiler).resolve().parents[1] if compiler else USUAL
    for home in (on_path, USUAL):
        if (home / RUNTIME).exists():
            return home
    wheel = (packages or Path(sysconfig.get_path("purelib"))) / WHEEL
    if not (wheel / "bin/nvcc").exists():
        return None
    return wheel_home(wheel, environment)


def wheel_home(wheel: Path, environment: Mapping[str, str]) -> Path:
    """Returns a directory in the user's cache with links to the files of `wheel`, in the layout of a toolkit: libraries
    in lib64 under the names that linkers look for, and the driver's library in lib64/stubs.

    The directory is named by a digest of its links and renamed into place, so an existing one is complete. Raises
    SlimxError if it cannot be created."""
    links = {name: wheel / name for name in ("bin", "include", "nvvm")}
    for library in sorted((wheel / "lib").glob("lib*")):
        links[f"lib64/{library.name}"] = library
        stem = library.name.partition(".so.")[0]
        if stem != library.name:
            links.setdefault(f"lib64/{stem}.so", library)
    driver = _driver(environment)
    if driver is not None:
        links["lib64/stubs/libcuda.so"] = driver
    digest = hashlib.sha256("\n".join(f"{name} {target}" for name, target in links.items()).encode()).hexdigest()
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slimx"
    home = cache / f"cuda-{digest[:16]}"
    if home.exists():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".cuda-") as scratch:
            unfinished = Path(scratch, "home")
            for name, target in links.items():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / name).symlink_to(target)
            unfinished.rename(home)
    except OSError as error:
        if not home.exists():  # it exists if another process of this node created it at the same time
            raise SlimxError(
                f"{home}, a directory of links to the CUDA toolkit in {wheel}, cannot be created ({error.strerror}); "
                "set XDG_CACHE_HOME to a writable directory, or CUDA_HOME to the directory of a CUDA toolkit",
                code="toolkit.cache",
                about=str(cache),
            ) from None
    return home


def _driver(environment: Mapping[str, str]) -> Path | None:
    """Returns the path at which the dynamic loader finds libcuda.so.1, the driver's library; None if it finds none."""
    usual = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64")
    for folder in [*filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")), *usual]:
        library = Path(folder, "libcuda.so.1")
        if library.exists():
            return library
    return None


def set_build_tools(
    environment: MutableMapping[str, str], packages: Path | None = None, programs: Path | None = None
) -> None:
    """Sets CUDA_HOME in `environment` to the toolkit that `cuda_home` finds, unless it is set, and adds the directory
    of ninja to PATH if ninja is not on PATH.

    `packages`: directory of CUDA wheels (default: site-packages of this Python). `programs`: directory of ninja
    (default: this Python's scripts directory).

    DeepGEMM and DeepEP fail an assertion on import if they find no toolkit. torch and flashinfer start ninja by name,
    but ninja is not on PATH if the virtual environment is not activated."""
    home = cuda_home(environment, packages)
    if home is not None:
        environment.setdefault("CUDA_HOME", str(home))
    programs = programs or Path(sysconfig.get_path("scripts"))
    path = environment.get("PATH", "")
    if shutil.which("ninja", path=path) is None and (programs / "ninja").exists():
        environment["PATH"] = os.pathsep.join(filter(None, (path, str(programs))))


def link_error(home: Path, *, driver: bool) -> str | None:
    """Compiles and links a small kernel with the toolkit in `home`, as SGLang 0.5.23
    (`kernels/jit/utils/compile/toolchain.py`) and flashinfer 0.7.2 (`jit/cpp_ext.py`) do at run time.

    Returns None if that succeeds, otherwise the error message of the program that failed. `driver`: True to link with
    the driver's library as well, as flashinfer does."""
    with tempfile.TemporaryDirectory() as scratch:
        source = f"{scratch}/one.cu"
        compiled = f"{scratch}/one.o"
        library = f"{scratch}/one.so"
        Path(source).write_text(PROGRAM)
        linker = os.environ.get("CXX", "c++")
        libraries = [f"-L{home}/lib64", "-lcudart"]
        if driver:
            libraries += [f"-L{home}/lib64/stubs", "-lcuda"]
        for command in (
            [f"{home}/bin/nvcc", "-Xcompiler", "-fPIC", "-c", source, "-o", compiled],
            [linker, "-shared", compiled, *libraries, "-o", library],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{command[0]}: {error}"
            if done.returncode:
                lines = (done.stderr + done.stdout).strip().splitlines() or [how_ended(done.returncode)]
                return next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
    return None


def python_header() -> Path | None:
    """Returns the path of Python.h for this interpreter, which Triton needs to compile kernel launchers; None if it is
    not installed."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header if header.exists() else None

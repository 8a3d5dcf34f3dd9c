"""The CUDA toolkit that compiles kernels while a process runs: where it is, and telling those who look for it."""

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
"""Variables of NVSHMEM, on which DeepEP's kernels between nodes are built. Else it would make communicators of NCCL,
which DeepEP does not use, on the memory of each GPU."""

USUAL = Path("/usr/local/cuda")
WHEEL = "nvidia/cu13"
"""Directory of site-packages in which the wheels of the CUDA lock have their files."""
RUNTIME = "lib64/libcudart.so"
"""The library that SGLang and flashinfer link their kernels with, as a toolkit has it."""
PROGRAM = "#include <cuda_runtime.h>\n__global__ void one(int* x) { *x = 1; }\nvoid run(int* x) { one<<<1, 1>>>(x); }\n"


def cuda_home(environment: Mapping[str, str], packages: Path | None = None) -> Path | None:
    """Returns the home of the toolkit: the one that CUDA_HOME or CUDA_PATH names, that of the nvcc on PATH, the usual
    place, or the lock's wheels in `packages` (site-packages of this Python); None if there is none.

    An nvcc on PATH may be a script that starts one elsewhere, so a home needs libraries, too. Wheels have them under
    names that no linker looks for: they get a home of links (`wheel_home`)."""
    if named := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(named)
    compiler = shutil.which("nvcc", path=environment.get("PATH"))
    on_path = Path(compiler).resolve().parents[1] if compiler else USUAL
    if (home := next((home for home in (on_path, USUAL) if (home / RUNTIME).exists()), None)) is not None:
        return home
    wheel = (packages or Path(sysconfig.get_path("purelib"))) / WHEEL
    return wheel_home(wheel, environment) if (wheel / "bin/nvcc").exists() else None


def wheel_home(wheel: Path, environment: Mapping[str, str]) -> Path:
    """Returns a directory in the user's cache with links to the files of `wheel`, laid out as a toolkit: libraries in
    lib64, with names for linkers, and the driver's in lib64/stubs.

    Its name is a digest of the links, and it is renamed into place: a directory of that name is complete.
    Raises SlimxError if the cache cannot be written."""
    links = {name: wheel / name for name in ("bin", "include", "nvvm")}
    for library in sorted((wheel / "lib").glob("lib*")):
        links[f"lib64/{library.name}"] = library
        if (stem := library.name.partition(".so.")[0]) != library.name:
            links.setdefault(f"lib64/{stem}.so", library)
    if (driver := _driver(environment)) is not None:
        links["lib64/stubs/libcuda.so"] = driver
    digest = hashlib.sha256("\n".join(f"{name} {target}" for name, target in links.items()).encode()).hexdigest()
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slimx"
    home = cache / f"cuda-{digest[:16]}"
    if home.exists():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".cuda-") as scratch:
            made = Path(scratch, "home")
            for name, target in links.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).symlink_to(target)
            made.rename(home)
    except OSError as error:
        if not home.exists():  # else another process of the node, which starts together with this one, was first
            raise SlimxError(
                f"{home} cannot be made ({error.strerror}), in which kernels would find the CUDA toolkit of {wheel}; "
                "set XDG_CACHE_HOME to a directory that can be written, or CUDA_HOME to a toolkit",
                code="toolkit.cache",
                about=str(cache),
            ) from None
    return home


def _driver(environment: Mapping[str, str]) -> Path | None:
    """The driver's library where the loader finds it."""
    usual = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64")
    folders = [*filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")), *usual]
    return next((path for folder in folders if (path := Path(folder, "libcuda.so.1")).exists()), None)


def set_build_tools(
    environment: MutableMapping[str, str], packages: Path | None = None, programs: Path | None = None
) -> None:
    """Set CUDA_HOME, and PATH for ninja, where nothing else names them, from the wheels of this Python: in `packages`
    (its site-packages) and `programs` (its directory of programs).

    DeepGEMM and DeepEP fail an assertion while they are imported if they find no toolkit. Torch and flashinfer start
    ninja by its name, which an environment that is not activated lacks."""
    if (home := cuda_home(environment, packages)) is not None:
        environment.setdefault("CUDA_HOME", str(home))
    programs = programs or Path(sysconfig.get_path("scripts"))
    path = environment.get("PATH", "")
    if shutil.which("ninja", path=path) is None and (programs / "ninja").exists():
        environment["PATH"] = os.pathsep.join(filter(None, (path, str(programs))))


def link_error(home: Path, *, driver: bool) -> str | None:
    """Returns why a kernel cannot be compiled and linked by the toolkit in `home` as SGLang 0.5.23
    (`kernels/jit/utils/compile/toolchain.py`) and flashinfer 0.7.2 (`jit/cpp_ext.py`) do it at run time: in the words
    of the program that fails; None if it can be. `driver`: with the driver's library, too, as flashinfer does."""
    with tempfile.TemporaryDirectory() as scratch:
        source, compiled, library = (Path(scratch, name) for name in ("one.cu", "one.o", "one.so"))
        source.write_text(PROGRAM)
        linker = os.environ.get("CXX", "c++")
        libraries = [f"-L{home}/lib64", "-lcudart", *([f"-L{home}/lib64/stubs", "-lcuda"] if driver else [])]
        for command in (
            [home / "bin/nvcc", "-Xcompiler", "-fPIC", "-c", source, "-o", compiled],
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
    """Python.h of this interpreter, which Triton's launchers are compiled with; None if it is not installed."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header if header.exists() else None

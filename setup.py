"""Builds the native libraries of csrc/ into slimx/_lib; everything else about the package stands in pyproject.toml.

The libraries have a plain C interface (csrc/reshard.h): no Python or torch headers, and one wheel for every Python 3.
The CPU libraries are always built, the CUDA libraries where nvcc is found, on a machine without a GPU too. When
building, SLIMX_CUDA=0 leaves them out and SLIMX_CUDA=1 refuses to go on without them; CXX names the C++ compiler.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

HEADERS = [str(path) for pattern in ("*.h", "*.cuh") for path in sorted(Path("csrc").glob(pattern))]
WARNINGS = ("-Wall", "-Wextra")
"""tests/unit/project/test_cuda_build.py refuses them, the build does not: other compilers warn of other things."""
LOGS = Path("build/compiler")
"""Directory of the compilers' output, a file for each library."""

CPU_FLAGS = [
    *("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off"),  # no -march: the code picks its loop when it runs
    *WARNINGS,
    *("-shared", "-fPIC"),
]
CPU = Extension(
    "slimx._lib.libslimx_cpu",
    sources=["csrc/reshard_cpu.cpp", "csrc/delta_cpu.cpp"],
    depends=HEADERS,
    extra_compile_args=CPU_FLAGS,
)
EXACT = Extension(
    "slimx._lib.libslimx_exact", sources=["csrc/exact_cpu.cpp"], depends=HEADERS, extra_compile_args=CPU_FLAGS
)
INT4 = Extension(
    "slimx._lib.libslimx_int4", sources=["csrc/int4_cpu.cpp"], depends=HEADERS, extra_compile_args=CPU_FLAGS
)

# The static CUDA runtime keeps its symbols to itself: torch brings a runtime of its own into the same process.
CUDA_FLAGS = [
    *("-O3", "-std=c++17", "-fmad=false"),  # fused, a multiply and an add would round once instead of twice
    *("-gencode", "arch=compute_90,code=sm_90", "-gencode", "arch=compute_100,code=sm_100"),
    *("-gencode", "arch=compute_100,code=compute_100"),  # PTX, for GB300 (sm_103) and what comes after it
    *("--threads", "0", "-cudart", "static", "-lineinfo", "-Xptxas", "-v"),
    *("-Xcompiler", ",".join(("-fPIC", "-fvisibility-inlines-hidden", "-ffp-contract=off", *WARNINGS))),
    *("-shared", "-Xlinker", "--exclude-libs=ALL"),
]
CUDA = Extension(
    "slimx._lib.libslimx_cuda",
    sources=["csrc/reshard.cu", "csrc/memory.cu"],
    depends=HEADERS,
    extra_compile_args=CUDA_FLAGS,
)
EXACT_CUDA = Extension(
    "slimx._lib.libslimx_exact_cuda", sources=["csrc/exact.cu"], depends=HEADERS, extra_compile_args=CUDA_FLAGS
)
INT4_CUDA = Extension(
    "slimx._lib.libslimx_int4_cuda", sources=["csrc/int4.cu"], depends=HEADERS, extra_compile_args=CUDA_FLAGS
)
ON_GPUS = [CUDA, EXACT_CUDA, INT4_CUDA]


def find_nvcc() -> str | None:
    """The CUDA compiler of $PATH, of $CUDA_HOME, or of the place where NVIDIA's packages put it."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next(filter(None, (shutil.which("nvcc", path=f"{h}/bin") for h in homes if h)), None)


def extensions() -> list[Extension]:
    wanted = os.environ.get("SLIMX_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"SLIMX_CUDA is {wanted!r}: set it to 0, 1 or auto")
    if wanted == "1" and find_nvcc() is None:
        raise SystemExit("SLIMX_CUDA is 1 and there is no nvcc: install CUDA 12.8 or later, or set CUDA_HOME")
    return [CPU, EXACT, INT4, *(ON_GPUS if wanted != "0" and find_nvcc() else ())]


class Build(build):
    def run(self) -> None:
        # setuptools packs whatever it finds there, so an earlier build's libraries and modules would reach the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildLibraries(build_ext):
    def run(self) -> None:
        Path("slimx/_lib").mkdir(exist_ok=True)
        super().run()
        if self.inplace:  # an earlier build's libraries would be loaded from the source tree
            built = {Path(self.get_ext_filename(ext.name)).name for ext in self.extensions}
            for library in Path("slimx/_lib").glob("*.so"):
                if library.name not in built:
                    library.unlink()

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # without Python's tag

    def build_extension(self, ext: Extension) -> None:
        compiler = self._compiler_of(ext)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler, *ext.extra_compile_args, *ext.sources, "-o", str(target)]
        print(shlex.join(command), flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or "warning" in done.stdout:
            print(done.stdout, end="", flush=True)
        LOGS.mkdir(parents=True, exist_ok=True)
        (LOGS / f"{target.stem}.log").write_text(done.stdout)
        if done.returncode:
            advice = (
                " (nvcc 12.8 is the first to know sm_100; SLIMX_CUDA=0 builds without CUDA)" if ext in ON_GPUS else ""
            )
            raise SystemExit(
                f"{compiler[0]} could not compile {shlex.join(ext.sources)}: its message stands above{advice}"
            )

    @staticmethod
    def _compiler_of(ext: Extension) -> list[str]:
        if ext in ON_GPUS:
            return [find_nvcc()]
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        if not compiler or shutil.which(compiler[0]) is None:
            raise SystemExit(
                f"slimx needs a C++17 compiler for {ext.sources[0]} and found no {shlex.join(compiler)!r}: "
                "install g++ or name a compiler in $CXX"
            )
        return compiler


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=extensions(), cmdclass={"build": Build, "build_ext": BuildLibraries, "bdist_wheel": Wheel})

"""Builds the native libraries of csrc/ into slimx/_lib; everything else about the package stands in pyproject.toml.

The libraries have a plain C interface (csrc/reshard.h): no Python or torch headers, and one wheel for every Python 3.
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

CPU = Extension(
    "slimx._lib.libslimx_cpu",
    sources=["csrc/reshard_cpu.cpp"],
    depends=["csrc/reshard.h", "csrc/words.h"],
    extra_compile_args=[
        *("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off"),  # no -march: the code picks its loop when it runs
        *("-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
    ],
)


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
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        if not compiler or shutil.which(compiler[0]) is None:
            raise SystemExit(
                f"slimx needs a C++17 compiler for {ext.sources[0]} and found no {shlex.join(compiler)!r}: "
                "install g++ or name a compiler in $CXX"
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler, *ext.extra_compile_args, *ext.sources, "-o", str(target)]
        print(shlex.join(command), flush=True)
        if subprocess.run(command).returncode:
            raise SystemExit(f"{compiler[0]} could not compile {ext.sources[0]}: its message stands above")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[CPU], cmdclass={"build": Build, "build_ext": BuildLibraries, "bdist_wheel": Wheel})

"""`slimx doctor`: shows what this machine has for a run, what is missing, and how to install it.

Every check may fail, and the doctor must not depend on the packages that it examines. So only Python's standard library
is imported at the top, and `python -m slimx.extras.doctor.machine` works even without the command line's packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import slimx
from slimx.errors import counted
from slimx.extras.doctor.requirements import (
    BUILD,
    INSTALL,
    INSTALL_CUDA,
    REPAIR,
    ROOT,
    fits,
    is_needed,
    lock_of,
    split_requirement,
)
from slimx.runtime.logs import how_ended
from slimx.runtime.toolkit import cuda_home, link_error, python_header

MAIN = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers", "numpy", "pydantic")
"""Packages that are always shown; others are shown only if they have a problem."""
STAND_INS = ("sgl_kernel", "torchvision")
"""Packages that have stand-ins on CPUs. Copied from `slimx.extras.cpu.adapters.absent.PACKAGES`, because this package
may not import that module; a test compares the two."""
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "slimx.adapters.sglang.plugin:register"
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
"""Names of FlashAttention's packages. Copied from `slimx.trainer.device.backends`, because that module imports
pydantic, which may be missing here."""
IMPORT_S = 120
"""Time limit in seconds for importing one package."""
MEMORY_GIB = 4.0
"""GiB of memory that the quickstart needs; its measured use is 3.2 GiB."""
SHM_MIB = 256.0
"""Size in MiB of the smallest object store that slimx requests from Ray."""

Say = Callable[[str, str | None], None]
"""Function that prints a line of text (first argument) in a style of the library rich (second; None: no style)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's output: a fact about this machine and, if there is one, the problem with it."""

    name: str
    text: str
    problem: str | None = None
    """Sentence about what is wrong and how to fix it; None if nothing is wrong."""
    needed: bool = True
    """True if the problem prevents a run, False if it is only worth a note."""


def examine(say: Say) -> bool:
    """Prints the properties and problems of this machine. Returns True if everything that a run needs is present."""
    problems: list[Finding] = []
    for title, rows in groupby(findings(), key=itemgetter(0)):
        say(title, "bold")
        for _, finding in rows:
            say(f"  {finding.name:<16} {finding.text}", _style(finding))
            if finding.problem:
                problems.append(finding)
    missing = any(finding.needed for finding in problems)
    say("Problems" if problems else "Nothing is missing on this machine.", "bold")
    for finding in problems:
        kind = "missing" if finding.needed else "note"
        say(f"  {kind:<8} {finding.name}: {finding.problem}", _style(finding))
    return not missing


def findings() -> Iterator[tuple[str, Finding]]:
    """Yields the title of a section and a finding of it, for all properties and problems of this machine."""
    for look in (machine, devices, packages, adapters, kernels, toolchain, sandbox):
        title = look.__name__.capitalize()
        try:
            for finding in look():
                yield title, finding
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            yield title, Finding(title.lower(), text, f"could not be examined ({text})")


def _style(finding: Finding) -> str | None:
    if finding.problem is None:
        return None
    return "red" if finding.needed else "yellow"


def machine() -> Iterator[Finding]:
    """Yields findings about Python, the processor, memory and shared memory."""
    version = platform.python_version()
    yield Finding(
        "python",
        f"{version} at {sys.executable}",
        None if sys.version_info[:2] == (3, 12) else f"the lock files are for Python 3.12, not {version}",
        needed=sys.version_info < (3, 12),
    )
    yield Finding("slimx", f"{slimx.__version__} in {ROOT}")
    yield Finding("processor", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores for this process")
    total, free = _memory()
    problem = None
    if free < MEMORY_GIB:
        problem = f"the quickstart needs {MEMORY_GIB:.0f} GiB; stop other programs or use a larger machine"
    yield Finding("memory", f"{total:.1f} GiB, {free:.1f} available", problem, needed=False)
    room = shutil.disk_usage("/dev/shm").free / 2**20
    problem = None
    if room < SHM_MIB:
        problem = f"Ray needs {SHM_MIB:.0f} MiB; give a container more, for example --shm-size=4g"
    yield Finding("/dev/shm", f"{room / 1024:.1f} GiB free", problem, needed=False)


def sandbox() -> Iterator[Finding]:
    """Yields findings about the sandbox in which rewards and tools run programs written by a model."""
    from slimx.errors import SlimxError

    try:
        from slimx.extras.boxes.programs.sandbox import Sandbox

        box = Sandbox()
        box.check()
    except (ImportError, SlimxError) as error:
        yield Finding("sandbox", "programs written by a model cannot be run here", str(error), needed=False)
    else:
        yield Finding("sandbox", f"holds; memory: {box.memory_bound}")


def devices() -> Iterator[Finding]:
    """Yields findings about the device that torch uses, and about the GPUs that the driver reports."""
    try:
        import torch
    except ImportError as error:
        # A CUDA build of torch without its libraries raises ImportError too.
        yield Finding("torch", f"cannot be imported: {error}", f"it is needed; run `{INSTALL}`")
    else:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        gpus = "sees no GPU: cpu"
        if torch.cuda.is_available():
            gpus = f"sees {counted(torch.cuda.device_count(), 'GPU')}: cuda"
        yield Finding("torch", f"{build} build, {gpus} is the device of a run with cluster.device=auto")
    yield from _gpus()


def packages() -> Iterator[Finding]:
    """Yields findings about installed packages, compared with the versions that slimx and the lock file require."""
    try:
        requirements = importlib.metadata.requires("slimx") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("slimx", "not installed", f"slimx is not installed in this Python; run `{BUILD}`")
        requirements = list(MAIN)
    lock, pins = lock_of()
    ranges = dict(split_requirement(line) for line in requirements if is_needed(line))
    ok = 0
    for name, needed in ranges.items():
        installed = _version(name)
        pinned = pins.get(name)
        text = f"{installed or 'not installed':<16} needed {needed or 'any':<14}"
        if pinned:
            text += f" {lock} {pinned}"
        if installed is None:
            yield Finding(name, text, f"not installed; run `{INSTALL}`")
        elif not fits(installed, needed):
            yield Finding(name, text, f"{installed} is not in {needed}; run `{INSTALL}`")
        elif pinned and installed.partition("+")[0] != pinned and name in MAIN:
            problem = f"{installed} is not the {pinned} of {lock}, with which slimx is tested"
            yield Finding(name, text, problem, needed=False)
        elif name in MAIN:
            yield Finding(name, text)
        else:
            ok += 1
    yield Finding("others", f"{ok} of {len(ranges.keys() - set(MAIN))} as needed")


def adapters() -> Iterator[Finding]:
    """Yields findings about adaptations for missing upstream features: which are in effect on this machine, and why."""
    cuda = _cuda()
    if cuda:
        yield Finding("megatron_cpu", "not in force: torch sees a GPU")
    else:
        why = "torch sees no GPU, so megatron-core's 'cuda' is the CPU and NCCL is gloo"
        yield Finding("megatron_cpu", f"in force: {why}")
    if _is_installed("transformer_engine"):
        yield Finding("megatron_layers", "not in force: Transformer Engine is installed")
    else:
        why = "Transformer Engine is not installed, so its layers are built from plain torch"
        problem = f"training on a GPU is slow without it; run `{INSTALL_CUDA}`" if cuda else None
        yield Finding("megatron_layers", f"in force: {why}", problem, needed=False)
    absent = [name for name in STAND_INS if not _is_installed(name)]
    if cuda:
        problem = None
        if absent:
            problem = f"SGLang needs {', '.join(absent)} on a GPU; run `{INSTALL_CUDA}`"
        yield Finding("sglang_absent", "not in force: torch sees a GPU", problem)
        yield Finding("sglang_cpu", "not in force: torch sees a GPU")
    else:
        text = "not in force: no package is absent"
        if absent:
            text = f"in force: stand-ins for {', '.join(absent)}, which are not installed and never called on the CPU"
        yield Finding("sglang_absent", text)
        yield Finding("sglang_cpu", "in force: seeded sampling and routed experts for SGLang's CPU path")
    registered = [entry.value for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)]
    if PLUGIN in registered:
        yield Finding("sglang_plugin", f"registered in {PLUGIN_GROUP}")
    else:
        yield Finding("sglang_plugin", "not registered", f"SGLang servers cannot find slimx's plugin; run `{BUILD}`")


def kernels() -> Iterator[Finding]:
    """Yields findings about the CPU libraries built from csrc/ and the instruction sets they use on this machine."""
    for name, module in (
        ("libslimx_cpu.so", "slimx.reshard.kernels.cpu"),
        ("libslimx_exact.so", "slimx.extras.exact.ordered.kernel"),
    ):
        try:
            kernel = importlib.import_module(module)
            isas = [isa for isa in kernel.isas() if isa != "best"]
            yield Finding(name, f"{', '.join(isas)} at {kernel.LIBRARY}")
        except Exception as error:
            compiler = shutil.which(os.environ.get("CXX", "g++"))
            problem = str(error)
            if "make build" not in problem:
                problem = f"cannot be loaded ({error}); run `{REPAIR}`"
            if not compiler:
                problem += "; there is no C++ compiler either: apt-get install g++"
            yield Finding(name, "not usable", problem)


def toolchain() -> Iterator[Finding]:
    """Yields findings about compilers for kernels that are built during a run, and about optional GPU packages."""
    cuda = _cuda()
    home = cuda_home(os.environ)
    header = python_header()
    unneeded = "" if cuda else " (needed on GPUs only)"
    remedy = f"engines build kernels when they start; run `{INSTALL_CUDA}`, or set CUDA_HOME"
    if home is None:
        problem = f"no CUDA toolkit was found; {remedy}" if cuda else None
        yield Finding("nvcc", f"none{unneeded}", problem, needed=cuda)
    else:
        error = link_error(home, driver=cuda)
        problem = None
        if error:
            problem = f"the CUDA toolkit in {home} builds no kernel ({error}); {remedy}"
        yield Finding("nvcc", f"{home}/bin/nvcc", problem, needed=cuda)
    if header:
        yield Finding("Python.h", f"{header}")
    else:
        problem = "Triton compiles its launchers with it; apt-get install python3.12-dev" if cuda else None
        yield Finding("Python.h", f"none{unneeded}", problem)
    if not _is_installed("deep_ep"):
        yield Finding("deep_ep", f"not installed{unneeded}")
    elif cuda:
        environment = dict(os.environ)
        if home is not None:
            environment["CUDA_HOME"] = str(home)
        error = _import_error("deep_ep", environment)
        if error is None:
            yield Finding("deep_ep", "can be imported", needed=False)
        else:
            problem = f"trainer.moe.dispatcher=flex needs it: {error}"
            yield Finding("deep_ep", f"cannot be imported: {error}", problem, needed=False)
    yield from _cubins(os.environ, cuda and _blackwell())
    installed = []
    for name in FLASH:
        version = _version(name)
        if version:
            installed.append(f"{name} {version}")
    yield Finding("FlashAttention", ", ".join(installed) or f"not installed{unneeded}")


def _cubins(environment: Mapping[str, str], blackwell: bool) -> Iterator[Finding]:
    """Yields a finding about the precompiled attention kernels (cubins) of flashinfer 0.7.2 for Blackwell GPUs.
    flashinfer downloads missing ones when it first needs them."""
    needed = _version("flashinfer-python")
    if needed is None:
        return
    base = environment.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
    folder = Path(environment.get("FLASHINFER_CUBIN_DIR") or Path(base, ".cache", "flashinfer", "cubins"))
    if _version("flashinfer-cubin") == needed:
        text = f"flashinfer-cubin {needed}"
    elif any(folder.rglob("*.cubin")):
        text = f"in {folder}"
    else:
        remedy = "from flashinfer.artifacts import download_artifacts; download_artifacts()"
        problem = f"SGLang's attention on Blackwell downloads them when it first needs each; run `python -c '{remedy}'`"
        yield Finding("cubins", f"none in {folder}", problem if blackwell else None, needed=False)
        return
    yield Finding("cubins", text)


def _import_error(module: str, environment: Mapping[str, str]) -> str | None:
    """Imports `module` in a separate process. Returns the last line of output if the import fails, else None."""
    completed = subprocess.run(
        [sys.executable, "-P", "-c", f"import {module}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
    )
    if completed.returncode == 0:
        return None
    lines = completed.stderr.strip().splitlines()
    if not lines:
        return how_ended(completed.returncode)
    return lines[-1]


def _gpus() -> Iterator[Finding]:
    try:
        import pynvml
    except ImportError as error:
        yield Finding("GPUs", "unknown", f"nvidia-ml-py cannot be imported ({error}); run `{INSTALL}`")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding("GPUs", f"none (NVIDIA's library reports: {error})")
        return
    try:
        driver = _string(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        yield Finding("driver", f"{driver}, {counted(count, 'GPU')}")
        for index in range(count):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = _string(pynvml.nvmlDeviceGetName(handle))
            uuid = _string(pynvml.nvmlDeviceGetUUID(handle))
            size = f"{memory.total / 2**30:.1f} GiB, {memory.free / 2**30:.1f} free"
            yield Finding(f"GPU {index}", f"{name}, {size}, {uuid}")
        if count and not _cuda():
            problem = (
                "torch sees none of these GPUs; check that it is a CUDA build, that CUDA_VISIBLE_DEVICES is not empty, "
                "and that the driver is recent enough"
            )
            yield Finding("GPUs", "not usable by torch", problem, needed=False)
    finally:
        pynvml.nvmlShutdown()


def _string(value: str | bytes) -> str:
    if isinstance(value, bytes):  # older releases of nvidia-ml-py
        return value.decode()
    return value


def _memory() -> tuple[float, float]:
    """Returns the total and the available memory of this machine in GiB."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return int(values["MemTotal"]) / 2**20, int(values["MemAvailable"]) / 2**20


def _cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _blackwell() -> bool:
    import torch

    return torch.cuda.get_device_capability()[0] >= 10


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(0 if examine(lambda text, style: print(text)) else 1)

"""The machine that a run is configured for: this one, or nodes of a type of GPU."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.errors import SlimxError
from slimx.preflight.hardware import DRIVER, GIB, GPUS

CPU = "cpu"
TYPES = (CPU, *GPUS)
"""Values of the option --gpu."""


@dataclass(frozen=True, slots=True)
class Target:
    """GPUs of a run."""

    gpu: str | None
    """Type of GPU that a plan assumes; None: the run uses CPUs."""
    gpus: int
    """Number of GPUs; 0 on CPUs."""
    nodes: int
    per_node: int
    """Number of GPUs per node; 0 on CPUs."""
    memory_gib: float | None = None
    """Memory of one GPU in GiB, if it is not of the type `gpu`; None: that of the type."""
    name: str = ""
    """Name of the GPU of this machine, if it is not of a known type."""


def this_machine() -> tuple[str, int, float]:
    """Returns the name of this machine's GPUs, their number and the memory of one in GiB; ("", 0, 0.0) without a
    GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        if not count:
            return "", 0, 0.0
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError:
        return "", 0, 0.0
    return (name.decode() if isinstance(name, bytes) else name), count, memory / GIB


def target(gpu: str | None, gpus: int | None, nodes: int | None) -> Target:
    """Returns the GPUs of a run from the options --gpu, --gpus (of all nodes together) and --nodes, each None if it is
    not given; without --gpu, this machine's. Raises SlimxError if the numbers contradict each other."""
    if gpu is not None and gpu not in TYPES:
        raise SlimxError(
            f"--gpu is {gpu!r}; choose one of {', '.join(TYPES)}, or leave --gpu out on a machine with such GPUs",
            code="init.gpu",
            about=gpu,
        )
    name, count, memory = ("", 0, 0.0) if gpu else this_machine()
    kind = gpu or next((known for known in GPUS if known in name.lower()), "h100" if count else CPU)
    if kind == CPU:
        for option, value in (("--gpus", gpus), ("--nodes", nodes)):
            if value:
                where = "a run on CPUs has none" if gpu else "this machine has no GPU"
                raise _refused(f"{option} is {value}, but {where}; set --gpu to {', '.join(GPUS)}", option)
        return Target(None, 0, 1, 0)
    unknown = bool(name) and kind not in name.lower()
    per_node = count or GPUS[kind].per_node
    total = gpus or (nodes or 1) * per_node
    needed = nodes or -(-total // per_node)
    if total > needed * per_node:
        raise _refused(f"--gpus {total} is more than {nodes} times {per_node}; raise --nodes", "--gpus")
    if nodes is not None:
        if total % nodes:
            raise _refused(f"--gpus {total} is not a multiple of --nodes {nodes}; change one of them", "--gpus")
        per_node = total // nodes
    memory_gib = round(memory - DRIVER / GIB, 1) if unknown else None
    return Target(kind, total, needed, per_node, memory_gib, name if unknown else "")


def _refused(sentence: str, option: str) -> SlimxError:
    return SlimxError(sentence, code="init.machine", about=option)

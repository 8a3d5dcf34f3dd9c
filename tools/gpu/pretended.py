"""A pretended GPU, for importing and compiling on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

import torch

GIB = 2**30
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132, warp_size=32
)
"""Properties of the device that SGLang reads."""


def pretend_gpu(gpu: SimpleNamespace = H100) -> None:
    """Lets torch report `gpu` as its only device for the rest of this process.

    Call it before `import sglang`, which caches these properties. Nothing can run on the device.
    """
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "get_device_properties": lambda device=None: gpu,
        "mem_get_info": lambda device=None: (gpu.total_memory - 2 * GIB, gpu.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)

"""A CUDA device that is not there: the kernels' own source run by emulated threads, behind the library's interface."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.transports import device

CSRC = Path(__file__).parents[3] / "csrc"
EMULATION = Path(__file__).with_name("cuda_emulation")
THREADS = Path(__file__).parents[1] / "emulated_threads.h"
EMULATOR = "emulator.so"
DEVICE = torch.device("cpu")
"""The device of torch in whose memory tensors of the emulated device lie."""


def build_emulator(folder: Path) -> None:
    """Compile the kernels of csrc/*.cuh with the emulated device.cuh in place of theirs: `folder`/EMULATOR."""
    folder.mkdir()
    for source in (*CSRC.glob("*.cuh"), *CSRC.glob("*.h"), *EMULATION.iterdir(), THREADS):
        shutil.copy(source, folder)
    flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off"]
    flags += ["-U_FORTIFY_SOURCE"]  # its longjmp, which Ubuntu's compiler takes by default, leaves no stack for another
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-static-libubsan"]
    command = ["g++", *flags, *checks, "-shared", "-fPIC", "emulator.cpp", "-o", EMULATOR]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def use_emulator(library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Gives kernel_cuda, and what shares a device's memory, the emulated device, on which any CPU tensor lies."""
    monkeypatch.setattr(kernel_cuda, "LIBRARY", library)
    monkeypatch.setattr(kernel_cuda, "device_of", lambda device: DEVICE)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="emulated"))
    monkeypatch.setattr(device, "tensor_at", memory_at)
    return kernel_cuda.load(library)


def memory_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """`slimx.reshard.transports.device.tensor_at` for memory of the host, which torch does not take by that way."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

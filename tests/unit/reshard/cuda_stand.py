"""A CUDA device that is not there: the kernels' own source run by emulated threads, behind the library's interface."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.transports import device
from tests.unit.emulation import CSRC, PATIENT, library

EMULATION = Path(__file__).with_name("cuda_emulation")
DEVICE = torch.device("cpu")
"""The device of torch in whose memory tensors of the emulated device lie."""


def emulator() -> Path:
    """Returns the library of the kernels of csrc/*.cuh, with the emulated device.cuh in place of theirs."""
    sources = (*CSRC.glob("*.cuh"), *CSRC.glob("*.h"), *EMULATION.iterdir())
    checks = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-static-libubsan")
    return library(EMULATION / "emulator.cpp", sources, "-O2", "-std=c++17", PATIENT, *checks)


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

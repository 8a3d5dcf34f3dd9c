"""GPU memory that processes of one machine share: trainer ranks write into one rank's memory, engines copy from it.

A path identifies it, as for a memory file:

    cuda-ipc:MACHINE/PID-NAMESPACE/PID:GPU:BYTES:ADDRESS:HANDLE

The CUDA IPC handle identifies the physical memory. Processes may therefore number their GPUs differently, or not see
the owner's GPU at all: they reach the memory from their own GPU, over NVLink or PCIe.

It is opened for one copy or one launch, and closed when that has ended on the device. Between two steps of a
publication no process has another's memory open: a reader that dies leaves nothing to clean up, and an owner may free
it. An owner that dies during a step fails only that step; readers keep their earlier copies.

torch's sharing of CUDA tensors is not used: it counts readers in a file of /dev/shm, so a killed reader keeps the
memory forever, and it shares whole blocks of its allocator instead of the tensor alone.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.packed import ON_DEVICE

UNIT = 2 * 2**20
"""Bytes. Smaller allocations may share a block of the driver's, all of which a handle would open."""
HANDLE = 64
"""Bytes of CUDA's handle."""


class DeviceMemory:
    """An allocation of this process on `device`, independent of torch's allocator. Its initial contents are
    undefined."""

    def __init__(self, size: int, device: torch.device | int = 0):
        """Allocates `size` bytes. Raises SlimxError if the device does not have them."""
        self.size = size
        self.device = kernel_cuda.device_of(device)
        library = _library()
        address = ctypes.c_uint64()
        nbytes = max(1, -(-size // UNIT)) * UNIT
        handle = ctypes.create_string_buffer(HANDLE)
        with torch.cuda.device(self.device):
            status = library.slimx_cuda_allocate(nbytes, ctypes.byref(address))
            if status:  # torch's allocator caches unused memory
                torch.cuda.empty_cache()
                status = library.slimx_cuda_allocate(nbytes, ctypes.byref(address))
            _raise_for(
                status,
                f"{self.device} has no room for a bucket of {nbytes >> 20} MiB; lower publish.bucket_mib",
                code="device.room",
                about="publish.bucket_mib",
            )
            self.address = address.value
            self._free = weakref.finalize(self, library.slimx_cuda_free, self.address)
            self._free.atexit = False  # freed with the process
            exported = library.slimx_cuda_export(self.address, handle)
            _raise_for(
                exported,
                f"memory of {self.device} cannot be shared with other processes",
                code="device.unshared",
                about=str(self.device),
            )
        self.path = f"{ON_DEVICE}{_process()}:{_gpu(self.device)}:{size}:{self.address:x}:{handle.raw.hex()}"

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [size]; must not outlive the memory."""
        return tensor_at(self.address, self.size, self.device)

    def clear(self) -> None:
        """Zeroes the memory and waits for it, because other processes do not synchronize with this one's streams."""
        with torch.cuda.device(self.device):
            self.bytes.zero_()
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Frees the memory, which no process may have open."""
        self._free()


@contextmanager
def opened(path: str, size: int, device: torch.device | int = 0) -> Iterator[int]:
    """Yields the address at which `device` reaches the memory at `path`, of which `size` bytes are used. Work on it
    must have ended on the device when the block ends. Raises SlimxError if the memory is smaller or cannot be reached.
    """
    owner, gpu, available, address, handle = path.removeprefix(ON_DEVICE).split(":")
    if int(available) < size:
        raise SlimxError(
            f"the bucket on GPU {gpu} has {available} bytes, but {size} were announced; publish again",
            code="bucket.size",
            about=path,
        )
    if owner == _process():  # CUDA does not open a handle in the process that created it
        yield int(address, 16)
        return
    owner_machine = owner.partition("/")[0]
    local_machine = _process().partition("/")[0]
    if owner_machine != local_machine:
        raise SlimxError(
            f"the bucket on GPU {gpu} belongs to another machine; cuda_ipc needs trainers and engines on one: set "
            "publish.transport=nixl",
            code="bucket.machine",
            about=path,
        )
    local_device = kernel_cuda.device_of(device)
    library = _library()
    mapped = ctypes.c_uint64()
    with torch.cuda.device(local_device):
        status = library.slimx_cuda_open(bytes.fromhex(handle), ctypes.byref(mapped))
        _raise_for(
            status,
            f"the bucket of process {owner.rpartition('/')[2]} on GPU {gpu} cannot be reached from {local_device} (GPU "
            f"{_gpu(local_device)}); its owner must be running, and the two GPUs must reach each other (nvidia-smi "
            "topo -p2p r)",
            code="bucket.gone",
            about=path,
        )
    try:
        yield mapped.value
    finally:
        with torch.cuda.device(local_device):
            library.slimx_cuda_close(mapped.value)


def fetch(path: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Returns a copy on `device` of bytes `start` to `stop` of the memory at `path`, uint8 [stop - start].

    Returns when the copy has ended: its owner may then overwrite the memory."""
    out = torch.empty(stop - start, dtype=torch.uint8, device=device)
    with opened(path, stop, device) as address, torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        status = _library().slimx_cuda_copy(out.data_ptr(), address + start, len(out), stream.cuda_stream)
        _raise_for(status, f"the copy of {len(out)} bytes to {device} failed", code="device.copy", about=path)
        try:
            stream.synchronize()
        except RuntimeError as error:
            raise SlimxError(
                f"the copy of {len(out)} bytes to {device} failed ({str(error).splitlines()[0]}): its owner may have "
                "exited; restart this process",
                code="device.copy",
                about=path,
            ) from error
    return out


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns memory of `device` as a tensor, uint8 [size], that does not own it."""
    return torch.as_tensor(_Array(address, size), device=device)


class _Array:
    """Memory in the form of CUDA's array interface."""

    def __init__(self, address: int, size: int):
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = interface


def _process() -> str:
    """Returns a name of this process that is unique across containers and machines, where PIDs repeat."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _library() -> ctypes.CDLL:
    return kernel_cuda.load(kernel_cuda.LIBRARY)


def _raise_for(status: int, problem: str, *, code: str, about: str) -> None:
    if status:
        reason = _library().slimx_cuda_error_string(status).decode()
        raise SlimxError(f"{problem} (CUDA error {status}: {reason})", code=code, about=about)

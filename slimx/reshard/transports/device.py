"""Memory of a GPU that processes of one machine share: trainer ranks write into one rank's, engines copy out of it.

A path names it as one names a memory file:

    cuda-ipc:MACHINE/PID-NAMESPACE/PID:GPU:BYTES:ADDRESS:HANDLE

The handle (CUDA's, for inter-process communication) says which physical memory it is. So processes may number their
GPUs differently, or not see the owner's at all: whoever opens it reaches it from its own GPU, over NVLink or PCIe.

It is opened for one copy or one launch, and closed when that has ended on the device. So between two steps of a
publication nobody has another's memory open: a reader that dies leaves nothing to clean up, and an owner may free it.
An owner that dies in the middle of a step fails that step only; what was copied before is the reader's own.

torch's sharing of CUDA tensors is not used: it counts readers in a file of /dev/shm, so that one that is killed keeps
the memory for ever, and it hands out parts of its allocator's blocks, of which the whole would become visible.
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
"""Bytes: smaller allocations may share a block of the driver's, and a handle would open all of that block."""
HANDLE = 64
"""Bytes of CUDA's handle."""


class DeviceMemory:
    """An allocation of this process on `device`, beside torch's allocator. Its contents are undefined at first."""

    def __init__(self, size: int, device: torch.device | int = 0):
        """`size` bytes. Raises SlimxError if the device has no room for them."""
        self.size, self.device = size, kernel_cuda.device_of(device)
        library, address = _library(), ctypes.c_uint64()
        nbytes = max(1, -(-size // UNIT)) * UNIT
        handle = ctypes.create_string_buffer(HANDLE)
        with torch.cuda.device(self.device):
            status = library.slimx_cuda_allocate(nbytes, ctypes.byref(address))
            if status:  # torch keeps what it does not use
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
            self._free.atexit = False  # the end of the process frees it, in an order of its own
            exported = library.slimx_cuda_export(self.address, handle)
            _raise_for(
                exported,
                f"memory of {self.device} cannot be shared with other processes",
                code="device.unshared",
                about=str(self.device),
            )
        place = f"{_process()}:{_gpu(self.device)}:{size}:{self.address:x}:{handle.raw.hex()}"
        self.path = ON_DEVICE + place

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [size]; the memory must outlive it."""
        return tensor_at(self.address, self.size, self.device)

    def clear(self) -> None:
        """Make all of it zero; returns when it is, for other processes wait for no stream of this one."""
        with torch.cuda.device(self.device):
            self.bytes.zero_()
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Free it. Nobody else may have it open."""
        self._free()


@contextmanager
def opened(path: str, size: int, device: torch.device | int = 0) -> Iterator[int]:
    """The address at which `device` reaches the memory at `path`, of which `size` bytes are used. What uses it has to
    have ended on the device when the block ends. Raises SlimxError if there are fewer, or it cannot reach them."""
    owner, gpu, held, address, handle = path.removeprefix(ON_DEVICE).split(":")
    if int(held) < size:
        raise SlimxError(
            f"the bucket on GPU {gpu} has {held} bytes, {size} were announced; publish again",
            code="bucket.size",
            about=path,
        )
    if owner == _process():  # CUDA opens no handle in the process that made it
        yield int(address, 16)
        return
    machine, here = owner.partition("/")[0], _process().partition("/")[0]
    if machine != here:
        raise SlimxError(
            f"the bucket on GPU {gpu} belongs to another machine; cuda_ipc needs trainers and engines on one: set "
            "publish.transport=nixl",
            code="bucket.machine",
            about=path,
        )
    place, library, found = kernel_cuda.device_of(device), _library(), ctypes.c_uint64()
    with torch.cuda.device(place):
        status = library.slimx_cuda_open(bytes.fromhex(handle), ctypes.byref(found))
        _raise_for(
            status,
            f"the bucket of process {owner.rpartition('/')[2]} on GPU {gpu} cannot be reached from {place} (GPU "
            f"{_gpu(place)}); its owner must run, and the two GPUs must reach each other (nvidia-smi topo -p2p r)",
            code="bucket.gone",
            about=path,
        )
    try:
        yield found.value
    finally:
        with torch.cuda.device(place):
            library.slimx_cuda_close(found.value)


def fetch(path: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """A copy, on `device`, of the bytes from `start` to `stop` of the memory at `path`, uint8 [stop - start].

    Returns when the copy has ended: its owner may write there again.
    """
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
                "ended; the device must be given up with this process",
                code="device.copy",
                about=path,
            ) from error
    return out


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Memory of `device` as a tensor, uint8 [size], that does not own it."""
    return torch.as_tensor(_Array(address, size), device=device)


class _Array:
    """Memory as torch and others take it from each other."""

    def __init__(self, address: int, size: int):
        form = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = form


def _process() -> str:
    """This process, among all that could come by a path of it: numbers repeat in containers and on other machines."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _library() -> ctypes.CDLL:
    return kernel_cuda.load(kernel_cuda.LIBRARY)


def _raise_for(status: int, what: str, *, code: str, about: str) -> None:
    if status:
        reason = _library().slimx_cuda_error_string(status).decode()
        raise SlimxError(f"{what} (CUDA error {status}: {reason})", code=code, about=about)

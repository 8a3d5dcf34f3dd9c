"""GPU memory that processes of one machine share: trainer ranks write buckets into it, and engines copy from it.

The process that owns the memory publishes a path, which identifies the memory as a file path identifies shared host
memory:

    cuda-ipc:MACHINE/PID-NAMESPACE/PID:GPU:BYTES:ADDRESS:HANDLE

The CUDA IPC handle identifies the physical memory. Processes may therefore number their GPUs differently, or not see
the owner's GPU at all: they reach the memory from their own GPU, over NVLink or PCIe.

A process opens the memory for one copy or one kernel launch, and closes it when that operation has finished on the
device. Between two steps of a publication no process has another's memory open: a reader that dies leaves nothing to
clean up, and an owner may free its memory. If an owner dies during a step, only that step fails; readers keep their
earlier copies.

torch's sharing of CUDA tensors is not used, for two reasons. It counts readers in a file of /dev/shm, so a killed
reader keeps the memory allocated forever; and it shares whole blocks of its allocator instead of the tensor alone."""

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
"""Allocation granularity in bytes. The driver may place smaller allocations in one block, and a handle opens the whole
block."""
HANDLE = 64
"""Size of a CUDA IPC handle in bytes."""


class DeviceMemory:
    """GPU memory that other processes can open; allocated by the driver instead of torch's allocator.

    Its initial contents are undefined. `path` identifies it to other processes (`opened`)."""

    def __init__(self, size: int, device: torch.device | int = 0):
        """Allocates `size` bytes on `device`. Raises SlimxError if not enough memory is free, or if the memory cannot
        be shared."""
        self.size = size
        self.device = kernel_cuda.device_of(device)
        library = _library()
        address = ctypes.c_uint64()
        nbytes = max(1, -(-size // UNIT)) * UNIT
        handle = ctypes.create_string_buffer(HANDLE)
        with torch.cuda.device(self.device):
            status = library.slimx_cuda_allocate(nbytes, ctypes.byref(address))
            if status:  # torch's allocator may hold free memory in its cache
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
            self._free.atexit = False  # the driver frees the memory when the process exits
            exported = library.slimx_cuda_export(self.address, handle)
            _raise_for(
                exported,
                f"memory of {self.device} cannot be shared with other processes through CUDA IPC; set "
                "publish.transport to memory",
                code="device.unshared",
                about=str(self.device),
            )
        self.path = f"{ON_DEVICE}{_process()}:{_gpu(self.device)}:{size}:{self.address:x}:{handle.raw.hex()}"

    @property
    def bytes(self) -> torch.Tensor:
        """Memory as a tensor, uint8 [size], which must not be used after `close`."""
        return tensor_at(self.address, self.size, self.device)

    def clear(self) -> None:
        """Sets all bytes to zero and waits until they are set, because other processes do not synchronize with this
        process's streams."""
        with torch.cuda.device(self.device):
            self.bytes.zero_()
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Frees the memory, which no process may have open at that time."""
        self._free()


@contextmanager
def opened(path: str, size: int, device: torch.device | int = 0) -> Iterator[int]:
    """Opens the first `size` bytes of GPU memory that a process owns under `path`, and yields their address on
    `device`.

    Operations on the memory must have finished on the device when the block ends. Raises SlimxError if the memory is
    smaller than `size`, belongs to another machine, or cannot be reached from `device`."""
    owner, gpu, available, address, handle = path.removeprefix(ON_DEVICE).split(":")
    if int(available) < size:
        raise SlimxError(
            f"the bucket on GPU {gpu} has {available} bytes of memory, but the publication announces {size} bytes; "
            "publish the weights again",
            code="bucket.size",
            about=path,
        )
    if owner == _process():  # CUDA cannot open a handle in the process that created it
        yield int(address, 16)
        return
    owner_machine = owner.partition("/")[0]
    local_machine = _process().partition("/")[0]
    if owner_machine != local_machine:
        raise SlimxError(
            f"the bucket is on GPU {gpu} of another machine, but publish.transport=cuda_ipc needs trainers and "
            "engines on the same machine; set publish.transport=nixl",
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
            f"the bucket of process {owner.rpartition('/')[2]} on GPU {gpu} cannot be reached from {local_device} "
            f"(GPU {_gpu(local_device)}); check that the process is running and that the two GPUs have peer access "
            "(nvidia-smi topo -p2p r)",
            code="bucket.gone",
            about=path,
        )
    try:
        yield mapped.value
    finally:
        with torch.cuda.device(local_device):
            library.slimx_cuda_close(mapped.value)


def fetch(path: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Copies the bytes `start` to `stop` of the memory at `path` to `device`, and returns the copy, uint8 [stop -
    start].

    The copy is complete on return, so the owner may overwrite the memory. Raises SlimxError as `opened` does, or if the
    copy fails."""
    out = torch.empty(stop - start, dtype=torch.uint8, device=device)
    with opened(path, stop, device) as address, torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        status = _library().slimx_cuda_copy(out.data_ptr(), address + start, len(out), stream.cuda_stream)
        problem = f"the copy of {len(out)} bytes from another process's GPU memory to {device} failed"
        remedy = "; run `slimx health` on this machine to test its GPUs"
        _raise_for(status, problem + remedy, code="device.copy", about=path)
        try:
            stream.synchronize()
        except RuntimeError as error:
            raise SlimxError(
                f"{problem} ({str(error).splitlines()[0]}); check that the other process still runs, and restart "
                "this process",
                code="device.copy",
                about=path,
            ) from error
    return out


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns a tensor, uint8 [size], that refers to memory of `device` at `address` without owning it."""
    return torch.as_tensor(_Array(address, size), device=device)


class _Array:
    """GPU memory in a form that torch accepts as a tensor: an object with CUDA's array interface."""

    def __init__(self, address: int, size: int):
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = interface


def _process() -> str:
    """Returns an identifier of this process, MACHINE/PID-NAMESPACE/PID, that is unique across containers and machines;
    a PID alone is not."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _library() -> ctypes.CDLL:
    return kernel_cuda.load(kernel_cuda.LIBRARY)


def _raise_for(status: int, problem: str, *, code: str, about: str) -> None:
    if status:
        reason = _library().slimx_cuda_error_string(status).decode()
        raise SlimxError(
            f"CUDA error {status} ({reason}): {problem}",
            code=code,
            about=about,
        )

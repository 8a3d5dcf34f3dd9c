"""The reshard kernels of `csrc/` on a GPU: the same records, buckets, checksums and flags as `cpu.py`, bit for bit.

A bucket takes one launch on a stream, and only `DevicePlan` (once) and `results` wait for the device, so `pack`
overlaps with other work and can be captured into a CUDA graph. The module can be imported anywhere; a missing library
or device is refused on use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch  # before the library is loaded, as in cpu.py

from slimx.errors import SlimxError
from slimx.library import load_library
from slimx.reshard.kernels.record import NONFINITE, check_destinations, check_ops, check_sources, check_sums

LIBRARY = Path(__file__).parents[2] / "_lib" / "libslimx_cuda.so"
ABI = 401
"""SLIMX_CUDA_ABI in csrc/interface.cuh."""
LONGEST = 2**31 - 1
"""Maximum rows of a piece and bytes of a row: the kernel counts them in 32 bits."""
BF16_AMAX = 0x7F80
"""Number of finite bf16 magnitudes."""


class DevicePlan:
    """The pieces of one bucket, checked, cut into tiles and stored on a device.

    Created once and used for every publication while the sources keep their addresses. The caller keeps the plan and
    every source alive until work that uses them has ended on the device."""

    def __init__(
        self,
        pieces: np.ndarray,
        *,
        bucket_bytes: int,
        names: Sequence[str],
        bucket: str,
        device: torch.device | int,
        checksum: bool = False,
        blocks_per_sm: int = 0,
    ):
        """Prepares the pieces on `device`.

        `pieces` [n] of `PIECE` have addresses that `device` can read; `names` of the tensors and `bucket` are for
        errors. `checksum`: for `checksum_rects` instead of `pack`, which ignores `bucket_bytes`. `blocks_per_sm`:
        thread blocks per SM, default as many as fit; results do not depend on it. Raises SlimxError for invalid pieces
        before anything is written."""
        self.library = load(LIBRARY)
        self.device = device_of(device)
        self.names = tuple(names)
        self.bucket = bucket
        self.bucket_bytes = bucket_bytes
        self.checksum = checksum
        _check(pieces, bucket_bytes, len(self.names), checksum)
        self._launch = _Launch()
        first = np.zeros(len(pieces) + 1, dtype=np.int64)
        with torch.cuda.device(self.device):
            index = ctypes.c_int64()
            checked = self.library.slimx_cuda_find_unreadable(pieces.ctypes.data, len(pieces), ctypes.byref(index))
            self.raise_for(checked, "checked")
            if index.value < len(pieces):
                raise SlimxError(
                    f"piece {index.value} of bucket {bucket} ({self.names[pieces[index.value]['tensor']]}) is at an "
                    f"address that {self.device} cannot read: pass pieces of tensors on that device",
                    code="kernel.address",
                    about=self.names[pieces[index.value]["tensor"]],
                )
            prepared = self.library.slimx_cuda_prepare(
                pieces.ctypes.data, len(pieces), checksum, blocks_per_sm, first.ctypes.data, ctypes.byref(self._launch)
            )
            self.raise_for(prepared, "prepared")
            self._pieces = torch.from_numpy(pieces.view(np.uint8).copy()).to(self.device)
            self._first = torch.from_numpy(first).to(self.device)
            torch.cuda.current_stream().synchronize()  # packs on other streams do not wait for the two copies
        self.count = len(pieces)

    @property
    def tiles(self) -> int:
        """Units of work, which thread blocks process one by one."""
        return self._launch.tiles

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return self._launch.blocks

    def launch(self, bucket: int, sums: torch.Tensor, flags: int, stream: torch.cuda.Stream | None) -> None:
        """Launches the kernel. `bucket` and `flags` are device addresses, 0 for checksums. For the functions below."""
        with torch.cuda.device(self.device):
            launch_stream = torch.cuda.current_stream() if stream is None else stream
            status = self.library.slimx_cuda_run(
                self._pieces.data_ptr(),
                self._first.data_ptr(),
                self.count,
                ctypes.byref(self._launch),
                bucket,
                sums.data_ptr(),
                flags,
                launch_stream.cuda_stream,
            )
        self.raise_for(status, "launched")

    def raise_for(self, status: int, step: str) -> None:
        """Raises SlimxError with CUDA's message if `status` is an error."""
        if status:
            reason = self.library.slimx_cuda_error_string(status).decode()
            raise SlimxError(
                f"bucket {self.bucket} cannot be {step} on {self.device}: {reason} (CUDA error {status})",
                code="kernel.cuda",
                about=self.bucket,
            )


class _Launch(ctypes.Structure):
    """SlimxCudaLaunch in csrc/reshard.cu."""

    _fields_ = [
        ("tiles", ctypes.c_int64),
        ("kernel", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def pack(
    plan: DevicePlan,
    bucket: torch.Tensor,
    sums: torch.Tensor,
    flags: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Queues one launch on `stream` (default: the current one) that does what `kernel.pack` does.

    `bucket`: [bytes] uint8. `sums`: [tensors] int64, the bits of the uint64 checksums, which are added to it: zero it
    first on the same stream; the host adds the seeds. `flags`: [tensors] int32, in which bits such as NONFINITE are
    set. All on the plan's device. Raises SlimxError if the launch fails; later failures are reported by `results`."""
    _check_tensor(plan, "the bucket", bucket, torch.uint8, 0 if plan.checksum else plan.bucket_bytes)
    pack_at(plan, bucket.data_ptr(), sums, flags, stream)


def pack_at(
    plan: DevicePlan,
    address: int,
    sums: torch.Tensor,
    flags: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Packs like `pack` into the `plan.bucket_bytes` bytes at `address`, memory that the plan's device can access; it
    may belong to another device or process. The caller guarantees its size."""
    if plan.checksum:
        raise SlimxError(
            f"the plan of bucket {plan.bucket} is for checksums: create it without checksum=True to pack it",
            code="kernel.plan_kind",
            about=plan.bucket,
        )
    _check_tensor(plan, "sums", sums, torch.int64, len(plan.names))
    _check_tensor(plan, "flags", flags, torch.int32, len(plan.names))
    if address % 16:
        raise SlimxError(
            f"the memory of bucket {plan.bucket} does not start at a multiple of 16 bytes: align it",
            code="kernel.alignment",
            about=plan.bucket,
        )
    plan.launch(address, sums, flags.data_ptr(), stream)


def checksum_rects(plan: DevicePlan, sums: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Queues one launch that adds checksums to `sums` [tensors] int64 as `kernel.checksum_rects` does."""
    if not plan.checksum:
        raise SlimxError(
            f"the plan of bucket {plan.bucket} is for packing: create it with checksum=True for checksums",
            code="kernel.plan_kind",
            about=plan.bucket,
        )
    _check_tensor(plan, "sums", sums, torch.int64, len(plan.names))
    plan.launch(0, sums, 0, stream)


def results(plan: DevicePlan, sums: torch.Tensor, flags: torch.Tensor | None = None) -> np.ndarray:
    """Waits for the current stream and returns the checksums [tensors] uint64, without seeds.

    Raises SlimxError naming the bucket if the device failed, and naming the first tensor with a value that is not
    finite."""
    try:
        checksums = sums.cpu().numpy().view(np.uint64)
        flag_bits = np.zeros(0, np.int32) if flags is None else flags.cpu().numpy()
    except RuntimeError as error:
        raise SlimxError(
            f"bucket {plan.bucket} failed on {plan.device} ({str(error).splitlines()[0]}): restart this process; the "
            "usual cause is a source that was freed or moved since the plan was created",
            code="kernel.cuda",
            about=plan.bucket,
        ) from error
    bad = np.flatnonzero(flag_bits & NONFINITE)
    if len(bad):
        raise SlimxError(
            f"{plan.names[bad[0]]} in bucket {plan.bucket} has a value that is infinite, NaN or too large for bf16 "
            f"({len(bad)} such tensors): check the last optimizer steps",
            code="kernel.nonfinite",
            about=plan.names[bad[0]],
        )
    return checksums


def triton_scales(device: torch.device | int) -> np.ndarray:
    """Returns {s, 1 / s} of the rule triton for every finite bf16 amax [32640, 2] fp32, as `device` divides (see
    cpu.py)."""
    library = load(LIBRARY)
    cuda_device = device_of(device)
    with torch.cuda.device(cuda_device):
        table = torch.empty(BF16_AMAX, 2, dtype=torch.float32, device=cuda_device)
        status = library.slimx_cuda_triton_scales(table.data_ptr(), torch.cuda.current_stream().cuda_stream)
        if status:
            reason = library.slimx_cuda_error_string(status).decode()
            raise SlimxError(
                f"{cuda_device} did not create the table of scales of the rule triton: {reason}",
                code="kernel.table",
                about=str(cuda_device),
            )
        return table.cpu().numpy()


def missing() -> str | None:
    """Returns the reason why this process cannot pack on a GPU, in one sentence; None if it can."""
    try:
        library = load(LIBRARY)
    except SlimxError as error:
        return str(error)
    count = ctypes.c_int()
    status = library.slimx_cuda_devices(ctypes.byref(count))
    if status or not count.value:
        reason = library.slimx_cuda_error_string(status).decode() if status else "it counts 0"
        return f"this process has no CUDA device ({reason}): pack on the CPU, or run on a machine with a GPU"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the CUDA device: install a CUDA build of torch"
    return None


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Returns the library at `path` with its signatures declared. Raises SlimxError if it is missing, broken or
    stale."""
    remedy = "run `make build` with nvcc installed (CUDA 12.8 or later), or pack on the CPU"
    library = load_library(path, what="the CUDA kernel library", version="slimx_cuda_abi", abi=ABI, remedy=remedy)
    address = ctypes.c_void_p
    count = ctypes.c_int64
    code = ctypes.c_int
    device_address = ctypes.c_uint64
    handle = ctypes.c_char_p
    library.slimx_cuda_error_string.argtypes = [code]
    library.slimx_cuda_error_string.restype = ctypes.c_char_p
    library.slimx_cuda_devices.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.slimx_cuda_prepare.argtypes = [address, count, code, code, address, ctypes.POINTER(_Launch)]
    library.slimx_cuda_find_unreadable.argtypes = [address, count, ctypes.POINTER(ctypes.c_int64)]
    launch = ctypes.POINTER(_Launch)
    library.slimx_cuda_run.argtypes = [address, address, count, launch, address, address, address, address]
    library.slimx_cuda_triton_scales.argtypes = [address, address]
    library.slimx_cuda_allocate.argtypes = [count, ctypes.POINTER(device_address)]
    library.slimx_cuda_free.argtypes = [device_address]
    library.slimx_cuda_close.argtypes = [device_address]
    library.slimx_cuda_export.argtypes = [device_address, handle]
    library.slimx_cuda_open.argtypes = [handle, ctypes.POINTER(device_address)]
    library.slimx_cuda_copy.argtypes = [device_address, device_address, count, address]
    return library


def device_of(device: torch.device | int) -> torch.device:
    """Returns `device` with its index. Raises SlimxError unless this process can pack on it."""
    reason = missing()
    if reason:
        raise SlimxError(reason)
    cuda_device = torch.device("cuda", device) if isinstance(device, int) else device
    if cuda_device.type != "cuda":
        raise SlimxError(
            f"a device plan needs a CUDA device, not {cuda_device}: pack on the CPU with slimx.reshard.kernels.cpu",
        )
    return cuda_device if cuda_device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _check(pieces: np.ndarray, bucket_bytes: int, tensors: int, checksum: bool) -> None:
    sums = np.zeros(tensors, dtype=np.uint64)
    check_sources(pieces, sums)
    if checksum:
        check_sums(pieces)
    else:
        check_ops(pieces, sums)
        check_destinations(pieces, bucket_bytes)
    width = np.maximum(pieces["item"], pieces["out"]).astype(np.int64)
    long = np.flatnonzero((pieces["rows"] > LONGEST) | (pieces["cols"] > LONGEST // np.maximum(width, 1)))
    if len(long):
        p = pieces[long[0]]
        raise SlimxError(
            f"piece {long[0]} of {len(pieces)} has {p['rows']} x {p['cols']} elements, more than a CUDA kernel allows "
            "in one row or column (2^31 - 1): split it",
            code="kernel.piece",
            about=str(long[0]),
        )


def _check_tensor(plan: DevicePlan, name: str, t: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    good = t.dtype == dtype and t.device == plan.device and t.is_contiguous() and t.dim() == 1
    if not good or t.numel() < count:
        raise SlimxError(
            f"{name} of bucket {plan.bucket} is {t.dtype} {list(t.shape)} on {t.device}: pass contiguous {dtype} "
            f"[{count}] on {plan.device}",
            code="kernel.argument",
            about=name,
        )

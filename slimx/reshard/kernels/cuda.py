"""The reshard kernels of `csrc/` on a GPU: the same records, buckets, checksums and flags as `cpu.py`, bit for bit.

A bucket costs one launch on a stream, and nothing here waits for the device except `DevicePlan` (once) and `results`.
So `pack` overlaps with other work and can be captured into a CUDA graph. Importable anywhere: what is missing, the
library or a device, is refused where it is needed.
"""

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
"""Rows of a piece, and bytes of one of its rows: the kernel counts them in 32 bits."""
BF16_AMAX = 0x7F80
"""Finite magnitudes that a bf16 has."""


class DevicePlan:
    """The pieces of one bucket, checked, cut into tiles and kept on a device.

    Made once and used for every publication, as long as the sources stay at their addresses. The caller keeps the plan
    and every source alive until work that uses them has ended on the device.
    """

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
        """`pieces` [n] of `PIECE` hold addresses that `device` can read; `names`: of the tensors, for errors, as
        `bucket` is. `checksum`: for `checksum_rects` instead of `pack`; then `bucket_bytes` does not matter.
        `blocks_per_sm`: thread blocks on each processor, as many as fit unless given; results do not depend on it.
        Raises SlimxError for pieces that cannot be run, before anything is written.
        """
        self.library = load(LIBRARY)
        self.device = device_of(device)
        self.names, self.bucket, self.bucket_bytes, self.checksum = tuple(names), bucket, bucket_bytes, checksum
        _check(pieces, bucket_bytes, len(self.names), checksum)
        self._launch, first = _Launch(), np.zeros(len(pieces) + 1, dtype=np.int64)
        with torch.cuda.device(self.device):
            index = ctypes.c_int64()
            found = self.library.slimx_cuda_find_unreadable(pieces.ctypes.data, len(pieces), ctypes.byref(index))
            self.raise_for(found, "checked")
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
            torch.cuda.current_stream().synchronize()  # a pack on another stream would not wait for the two copies
        self.count = len(pieces)

    @property
    def tiles(self) -> int:
        """Units of work that thread blocks take one by one."""
        return self._launch.tiles

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return self._launch.blocks

    def launch(self, bucket: int, sums: torch.Tensor, flags: int, stream: torch.cuda.Stream | None) -> None:
        """One launch; `bucket` and `flags` are device addresses, 0 for the checksum. For the functions below."""
        with torch.cuda.device(self.device):
            queue = torch.cuda.current_stream() if stream is None else stream
            status = self.library.slimx_cuda_run(
                self._pieces.data_ptr(),
                self._first.data_ptr(),
                self.count,
                ctypes.byref(self._launch),
                bucket,
                sums.data_ptr(),
                flags,
                queue.cuda_stream,
            )
        self.raise_for(status, "launched")

    def raise_for(self, status: int, step: str) -> None:
        """Raises SlimxError with CUDA's own words where `status` is an error."""
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
    """Queues one launch on `stream` (the current one unless given) that does what `kernel.pack` does.

    `bucket`: [bytes] uint8. `sums`: [tensors] int64, the bits of the uint64 checksums, added to: zero it first on the
    same stream; seeds are the host's to add. `flags`: [tensors] int32, bits such as NONFINITE are set in it. All on the
    plan's device. Raises SlimxError where the launch fails; what fails later shows in `results`.
    """
    _check_tensor(plan, "the bucket", bucket, torch.uint8, 0 if plan.checksum else plan.bucket_bytes)
    pack_at(plan, bucket.data_ptr(), sums, flags, stream)


def pack_at(
    plan: DevicePlan,
    address: int,
    sums: torch.Tensor,
    flags: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """`pack` into the `plan.bucket_bytes` bytes at `address`, which the plan's device reaches: also those of another
    device, or process. The caller vouches for their size."""
    if plan.checksum:
        raise SlimxError(
            f"the plan of bucket {plan.bucket} is for checksums: make it without checksum=True to pack it",
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
    """Queues one launch that adds to `sums` [tensors] int64 what `kernel.checksum_rects` does."""
    if not plan.checksum:
        raise SlimxError(
            f"the plan of bucket {plan.bucket} is for packing: make it with checksum=True to sum it",
            code="kernel.plan_kind",
            about=plan.bucket,
        )
    _check_tensor(plan, "sums", sums, torch.int64, len(plan.names))
    plan.launch(0, sums, 0, stream)


def results(plan: DevicePlan, sums: torch.Tensor, flags: torch.Tensor | None = None) -> np.ndarray:
    """Waits for the current stream, and gives the checksums [tensors] uint64, still without seeds.

    Raises SlimxError naming the bucket where the device failed, and naming the first tensor that holds a value that is
    not finite.
    """
    try:
        found = sums.cpu().numpy().view(np.uint64)
        bad = [] if flags is None else np.flatnonzero(flags.cpu().numpy() & NONFINITE)
    except RuntimeError as error:
        raise SlimxError(
            f"bucket {plan.bucket} failed on {plan.device} ({str(error).splitlines()[0]}): the device must be given up "
            "with its process; a source that was freed or moved since the plan was made is the usual cause",
            code="kernel.cuda",
            about=plan.bucket,
        ) from error
    if len(bad):
        raise SlimxError(
            f"{plan.names[bad[0]]} in bucket {plan.bucket} holds a value that is infinite or not a number, or too "
            f"large for bf16 ({len(bad)} such tensors): look at the last optimizer steps",
            code="kernel.nonfinite",
            about=plan.names[bad[0]],
        )
    return found


def triton_scales(device: torch.device | int) -> np.ndarray:
    """{s, 1 / s} of the rule triton for every finite bf16 amax [32640, 2] fp32, as `device` divides: see cpu.py."""
    library, place = load(LIBRARY), device_of(device)
    with torch.cuda.device(place):
        table = torch.empty(BF16_AMAX, 2, dtype=torch.float32, device=place)
        status = library.slimx_cuda_triton_scales(table.data_ptr(), torch.cuda.current_stream().cuda_stream)
        if status:
            reason = library.slimx_cuda_error_string(status).decode()
            raise SlimxError(
                f"{place} did not make the table of scales of the rule triton: {reason}",
                code="kernel.table",
                about=str(place),
            )
        return table.cpu().numpy()


def missing() -> str | None:
    """The reason that keeps this process from packing on a GPU, in one sentence; None where nothing does."""
    try:
        count, library = ctypes.c_int(), load(LIBRARY)
    except SlimxError as error:
        return str(error)
    status = library.slimx_cuda_devices(ctypes.byref(count))
    if status or not count.value:
        reason = library.slimx_cuda_error_string(status).decode() if status else "it counts 0"
        return f"this process has no CUDA device ({reason}): pack on the CPU, or run where a GPU is"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the CUDA device: install a CUDA build of torch"
    return None


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library at `path` with its signatures declared. Raises SlimxError if it is missing, broken or stale."""
    remedy = "run `make build` where nvcc is (CUDA 12.8 or later), or pack on the CPU"
    library = load_library(path, what="the CUDA kernel library", version="slimx_cuda_abi", abi=ABI, remedy=remedy)
    address, count, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.slimx_cuda_error_string.argtypes = [code]
    library.slimx_cuda_error_string.restype = ctypes.c_char_p
    library.slimx_cuda_devices.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.slimx_cuda_prepare.argtypes = [address, count, code, code, address, ctypes.POINTER(_Launch)]
    library.slimx_cuda_find_unreadable.argtypes = [address, count, ctypes.POINTER(ctypes.c_int64)]
    run = [address, address, count, ctypes.POINTER(_Launch), address, address, address, address]
    library.slimx_cuda_run.argtypes = run
    library.slimx_cuda_triton_scales.argtypes = [address, address]
    place, handle = ctypes.c_uint64, ctypes.c_char_p
    library.slimx_cuda_allocate.argtypes = [count, ctypes.POINTER(place)]
    library.slimx_cuda_free.argtypes = library.slimx_cuda_close.argtypes = [place]
    library.slimx_cuda_export.argtypes = [place, handle]
    library.slimx_cuda_open.argtypes = [handle, ctypes.POINTER(place)]
    library.slimx_cuda_copy.argtypes = [place, place, count, address]
    return library


def device_of(device: torch.device | int) -> torch.device:
    """`device` with its number. Raises SlimxError unless it is one that this process can pack on."""
    reason = missing()
    if reason:
        raise SlimxError(reason)
    place = torch.device("cuda", device) if isinstance(device, int) else device
    if place.type != "cuda":
        raise SlimxError(
            f"a device plan needs a CUDA device and got {place}: pack on the CPU by slimx.reshard.kernels.cpu",
        )
    return place if place.index is not None else torch.device("cuda", torch.cuda.current_device())


def _check(pieces: np.ndarray, bucket_bytes: int, tensors: int, checksum: bool) -> None:
    sums = np.zeros(tensors, dtype=np.uint64)
    check_sources(pieces, sums)
    if checksum:
        check_sums(pieces)
    else:
        check_ops(pieces, sums)
        check_destinations(pieces, bucket_bytes)
    rows, width = pieces["rows"], np.maximum(pieces["item"], pieces["out"]).astype(np.int64)
    long = np.flatnonzero((rows > LONGEST) | (pieces["cols"] > LONGEST // np.maximum(width, 1)))
    if len(long):
        p = pieces[long[0]]
        raise SlimxError(
            f"piece {long[0]} of {len(pieces)} has {p['rows']} x {p['cols']} elements, more than a CUDA kernel counts "
            "in one row or column (2^31 - 1): split it",
            code="kernel.piece",
            about=str(long[0]),
        )


def _check_tensor(plan: DevicePlan, what: str, t: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    good = t.dtype == dtype and t.device == plan.device and t.is_contiguous() and t.dim() == 1
    if not good or t.numel() < count:
        raise SlimxError(
            f"{what} of bucket {plan.bucket} is {t.dtype} {list(t.shape)} on {t.device}: pass contiguous {dtype} "
            f"[{count}] on {plan.device}",
            code="kernel.argument",
            about=what,
        )

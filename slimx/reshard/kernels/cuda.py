"""Python interface to the CUDA kernels in `csrc/` that pack buckets: the same records, bytes, checksums and flags as
`cpu.py`, bit for bit.

One kernel launch on a stream packs a bucket. Only creating a `DevicePlan` (done once) and `results` wait for the
device, so `pack` overlaps with other work and can be captured into a CUDA graph. The module can be imported on any
machine; a missing library or device raises SlimxError on first use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch  # imported before the kernel library is loaded, as in cpu.py

from slimx.errors import SlimxError
from slimx.library import load_library
from slimx.reshard.kernels.record import NONFINITE, check_destinations, check_ops, check_sources, check_sums

LIBRARY = Path(__file__).parents[2] / "_lib" / "libslimx_cuda.so"
ABI = 401
"""Version of the CUDA library's interface that this module calls; must equal SLIMX_CUDA_ABI in csrc/interface.cuh."""
LONGEST = 2**31 - 1
"""Maximum number of rows in a piece and of bytes in a row, both of which the kernel counts in 32-bit integers."""
BF16_AMAX = 0x7F80
"""Number of finite, non-negative bf16 values. The table of scales for the rule `triton` has one row per value."""


class DevicePlan:
    """The pieces of one bucket, checked, divided into tiles and stored on a device.

    Created once and used for every publication until a source tensor moves to another address. The caller keeps the
    plan and every source tensor alive until work that uses them has finished on the device."""

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
        """Checks `pieces`, [n] of `PIECE`, and copies them to `device`, which must be able to read their addresses.

        `names`: names of the tensors, one per checksum; `names` and the bucket's label `bucket` appear in error
        messages. `bucket_bytes`: size of the bucket; ignored if `checksum` is True. `checksum`: True makes a plan for
        `checksum_rects` instead of `pack`. `blocks_per_sm`: thread blocks per SM; 0 means as many as fit. The number
        does not affect results. Raises SlimxError for invalid pieces."""
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
                    f"piece {index.value} of bucket {bucket}, a part of {self.names[pieces[index.value]['tensor']]}, "
                    f"is at an address that {self.device} cannot read; pass only pieces of tensors on this device",
                    code="kernel.address",
                    about=self.names[pieces[index.value]["tensor"]],
                )
            prepared = self.library.slimx_cuda_prepare(
                pieces.ctypes.data, len(pieces), checksum, blocks_per_sm, first.ctypes.data, ctypes.byref(self._launch)
            )
            self.raise_for(prepared, "prepared")
            self._pieces = torch.from_numpy(pieces.view(np.uint8).copy()).to(self.device)
            self._first = torch.from_numpy(first).to(self.device)
            torch.cuda.current_stream().synchronize()  # launches on other streams would not wait for the two copies
        self.count = len(pieces)

    @property
    def tiles(self) -> int:
        """Number of tiles, the units of work that the kernel's thread blocks process one after another."""
        return self._launch.tiles

    @property
    def blocks(self) -> int:
        """Number of thread blocks in the kernel's launch grid."""
        return self._launch.blocks

    def launch(self, bucket: int, sums: torch.Tensor, flags: int, stream: torch.cuda.Stream | None) -> None:
        """Launches the kernel on `stream`, or on the current stream if `stream` is None. Called by `pack_at` and
        `checksum_rects`, which check the arguments. `bucket`, `flags`: device addresses; 0 if the plan only computes
        checksums."""
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
        """Raises SlimxError with CUDA's message if `status`, returned by the call that performed `step`, is an
        error."""
        if status:
            reason = self.library.slimx_cuda_error_string(status).decode()
            raise SlimxError(
                f"the kernel of bucket {self.bucket} could not be {step} on {self.device} ({reason}, CUDA error "
                f"{status}); run `slimx health` on this machine to test its GPUs",
                code="kernel.cuda",
                about=self.bucket,
            )


class _Launch(ctypes.Structure):
    """Python counterpart of the C struct SlimxCudaLaunch in csrc/interface.cuh: the kernel that executes a plan, and
    its launch dimensions."""

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
    """Queues one kernel launch on `stream` (None: the current stream) that packs a bucket on the GPU as
    `slimx.reshard.kernels.cpu.pack` does on the CPU.

    All tensors are on the plan's device. `bucket`: [bytes] uint8. `sums`: [tensors] int64, the bits of the uint64
    checksums. The kernel adds to `sums`, so the caller zeroes it first on the same stream and adds the seeds on the
    host. `flags`: [tensors] int32, in which bits such as NONFINITE are set. Raises SlimxError if the launch fails;
    later failures are reported by `results`."""
    _check_tensor(plan, "the bucket", bucket, torch.uint8, 0 if plan.checksum else plan.bucket_bytes)
    pack_at(plan, bucket.data_ptr(), sums, flags, stream)


def pack_at(
    plan: DevicePlan,
    address: int,
    sums: torch.Tensor,
    flags: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Queues the kernel launch of `pack`, with the `plan.bucket_bytes` bytes of memory at `address` as the bucket.
    `address` must be a multiple of 16.

    The plan's device must be able to access that memory, which may belong to another device or process. The caller
    guarantees that it is large enough."""
    if plan.checksum:
        raise SlimxError(
            f"the plan of bucket {plan.bucket} only computes checksums; create a plan without checksum=True to pack",
            code="kernel.plan_kind",
            about=plan.bucket,
        )
    _check_tensor(plan, "sums", sums, torch.int64, len(plan.names))
    _check_tensor(plan, "flags", flags, torch.int32, len(plan.names))
    if address % 16:
        raise SlimxError(
            f"the memory of bucket {plan.bucket} starts at address {address:#x}, not at a multiple of 16; align this "
            "memory to 16 bytes",
            code="kernel.alignment",
            about=plan.bucket,
        )
    plan.launch(address, sums, flags.data_ptr(), stream)


def checksum_rects(plan: DevicePlan, sums: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Queues one kernel launch that adds the checksums of the plan's pieces to `sums`, [tensors] int64, as
    `slimx.reshard.kernels.cpu.checksum_rects` does on the CPU. `stream`: stream for the launch; None for the current
    one."""
    if not plan.checksum:
        raise SlimxError(
            f"the plan of bucket {plan.bucket} only packs; create a plan with checksum=True to compute checksums",
            code="kernel.plan_kind",
            about=plan.bucket,
        )
    _check_tensor(plan, "sums", sums, torch.int64, len(plan.names))
    plan.launch(0, sums, 0, stream)


def results(plan: DevicePlan, sums: torch.Tensor, flags: torch.Tensor | None = None) -> np.ndarray:
    """Waits for the current stream and returns the checksums that `pack` or `checksum_rects` added to `sums`, as
    [tensors] uint64. The seeds are not included.

    `flags`: the flags that were passed to `pack`; None for checksums. Raises SlimxError naming the bucket if the device
    failed, or naming the first tensor that contains a value that is not finite."""
    try:
        checksums = sums.cpu().numpy().view(np.uint64)
        flag_bits = np.zeros(0, np.int32) if flags is None else flags.cpu().numpy()
    except RuntimeError as error:
        raise SlimxError(
            f"the kernel of bucket {plan.bucket} failed on {plan.device} ({str(error).splitlines()[0]}); "
            "restart this process, and do not free or move source tensors after the plan has been created",
            code="kernel.cuda",
            about=plan.bucket,
        ) from error
    bad = np.flatnonzero(flag_bits & NONFINITE)
    if len(bad):
        raise SlimxError(
            f"{plan.names[bad[0]]} in bucket {plan.bucket} has a value that is infinite, NaN or too large for "
            f"bf16 (affected tensors: {len(bad)}); resume from an older checkpoint with a lower trainer.optimizer.lr",
            code="kernel.nonfinite",
            about=plan.names[bad[0]],
        )
    return checksums


def triton_scales(device: torch.device | int) -> np.ndarray:
    """Returns the table of fp8 scales for the quantization rule `triton`, [32640, 2] fp32: scale s = amax / 448 and 1 /
    s for every finite bf16 amax, computed on `device` with a GPU's approximate division. The CPU kernels use a saved
    copy (`TRITON_SCALES` in cpu.py)."""
    library = load(LIBRARY)
    cuda_device = device_of(device)
    with torch.cuda.device(cuda_device):
        table = torch.empty(BF16_AMAX, 2, dtype=torch.float32, device=cuda_device)
        status = library.slimx_cuda_triton_scales(table.data_ptr(), torch.cuda.current_stream().cuda_stream)
        if status:
            raise SlimxError(
                f"{cuda_device} could not compute the scale table for the quantization rule triton ("
                f"{library.slimx_cuda_error_string(status).decode()}); run `slimx health` to test this machine's GPUs",
                code="kernel.table",
                about=str(cuda_device),
            )
        return table.cpu().numpy()


def missing() -> str | None:
    """Returns the reason why this process cannot pack on a GPU, as one sentence with a remedy; None if it can."""
    try:
        library = load(LIBRARY)
    except SlimxError as error:
        return str(error)
    count = ctypes.c_int()
    status = library.slimx_cuda_devices(ctypes.byref(count))
    if status or not count.value:
        reason = library.slimx_cuda_error_string(status).decode() if status else "CUDA counts 0 devices"
        return f"this process has no CUDA device ({reason}): pack on the CPU, or run on a machine with a GPU"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use this machine's CUDA device; install a CUDA build of torch"
    return None


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Returns the CUDA kernel library at `path`, with the argument types of its functions declared. Raises SlimxError
    if the library is missing, cannot be loaded, or has another ABI version."""
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
    """Returns `device` as a CUDA device with an index; an int is the index, and a device without an index becomes the
    current one. Raises SlimxError if `device` is not a CUDA device or this process cannot pack on a GPU."""
    reason = missing()
    if reason:
        raise SlimxError(reason)
    cuda_device = torch.device("cuda", device) if isinstance(device, int) else device
    if cuda_device.type != "cuda":
        raise SlimxError(
            f"{cuda_device} is not a CUDA device; pass a CUDA device, or pack on the CPU with "
            "slimx.reshard.kernels.cpu",
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
            f"piece {long[0]} of {len(pieces)} has {p['rows']} rows of {p['cols']} elements, but the CUDA kernel "
            "allows at most 2^31 - 1 rows and 2^31 - 1 bytes per row; split the piece",
            code="kernel.piece",
            about=str(long[0]),
        )


def _check_tensor(plan: DevicePlan, name: str, t: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    good = t.dtype == dtype and t.device == plan.device and t.is_contiguous() and t.dim() == 1
    if not good or t.numel() < count:
        raise SlimxError(
            f"bucket {plan.bucket}: the tensor passed for {name} has dtype {t.dtype} and shape {list(t.shape)} on "
            f"{t.device}; pass a contiguous 1-D {dtype} tensor of {count} or more elements on {plan.device}",
            code="kernel.argument",
            about=name,
        )

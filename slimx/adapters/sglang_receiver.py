"""Weights inside the server: staged from shared memory, verified, copied in place, verified again from what is held.

Written for sglang 0.5.23. `stage`, `abort`, `verify` and `inventory` are reached through the stock endpoint
/weights_checker (`sglang_plugin`), `load_staged` through /update_weights_from_tensor. SGLang loads in place and dies of
an exception in a loader, so nothing is copied before its bytes are proven, and `load_staged` reports instead of
raising.
"""

from __future__ import annotations

import difflib
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slimx.adapters.sglang_layout import Layout, hf_layout
from slimx.errors import SlimxError

Checksum = Callable[[torch.Tensor], int]
Answer = dict[str, Any]

ATTRIBUTE = "_slimx_staging"


@dataclass(slots=True)
class Staging:
    """What one model's receiver knows. It hangs on the model, so that it lives and ends with it."""

    layout: Layout
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Verified and not yet copied: views of the publisher's memory."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksum of every staged tensor."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Checksum of every tensor that was ever copied: what the model should hold."""
    outcome: Answer = field(default_factory=dict)
    """How the last copy ended: {"loaded": count} or {"loaded": count so far, "error": text}."""

    def drop(self) -> None:
        """Forget what is staged; the mapping ends with its last view."""
        self.tensors.clear()
        self.checksums.clear()


def staging_of(model: nn.Module) -> Staging:
    """The model's receiver, made at the first use."""
    if not hasattr(model, ATTRIBUTE):
        object.__setattr__(model, ATTRIBUTE, Staging(hf_layout(model)))
    return getattr(model, ATTRIBUTE)


def kernel_checksum(tensor: torch.Tensor) -> int:
    """The checksum of slimx's kernels, 64 bits over the raw bytes. Imported late: only a publication needs them."""
    from slimx.reshard.kernel import checksum_tensor

    return checksum_tensor(tensor)


def inventory(model: nn.Module) -> Answer:
    """`{"tensors": {name: "dtype:d0,d1"}, "uncovered": {parameter: why}}`: all that a publication must bring."""
    layout = staging_of(model).layout
    tensors = {name: _describe(place.parameter.dtype, place.shape) for name, place in layout.places.items()}
    return {"tensors": tensors, "uncovered": layout.uncovered}


def stage(
    model: nn.Module,
    *,
    fd_path: str,
    tensors: list[dict[str, Any]],
    bucket: int,
    size: int,
    checksum: Checksum = kernel_checksum,
) -> Answer:
    """Map one bucket of `size` bytes at `fd_path` and keep its tensors once every checksum agrees.

    Each entry of `tensors` is `{name, dtype, shape, offset, nbytes, checksum}` (offset in bytes, checksum as 16 hex
    digits). Nothing of the model is touched. Any error drops the whole staging area: a publication is staged completely
    or not.
    """
    staging = staging_of(model)
    try:
        for entry in tensors:
            _check_entry(staging, entry, bucket, size)
        memory = _map(fd_path, size, bucket)
        for entry in tensors:
            name, dtype = entry["name"], getattr(torch, entry["dtype"])
            count = entry["nbytes"] // dtype.itemsize
            view = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["offset"]).view(entry["shape"])
            expected, actual = int(entry["checksum"], 16), checksum(view)
            if actual != expected:
                raise SlimxError(
                    f"tensor {name} of bucket {bucket} has checksum {actual:016x} in the server, {expected:016x} at "
                    "the publisher; its bytes changed on the way: publish again"
                )
            staging.tensors[name], staging.checksums[name] = view, expected
    except Exception:
        staging.drop()
        raise
    return status(model)


def abort(model: nn.Module) -> Answer:
    """Drop what is staged; nothing was copied, so nothing changed. May be called at any time, again and again."""
    staging_of(model).drop()
    return status(model)


def status(model: nn.Module) -> Answer:
    """`{"staged": count, "bytes": sum, "missing": [names not staged], "outcome": {...}}`."""
    staging = staging_of(model)
    return {
        "staged": len(staging.tensors),
        "bytes": sum(tensor.nbytes for tensor in staging.tensors.values()),
        "missing": [name for name in staging.layout.places if name not in staging.tensors],
        "outcome": staging.outcome,
    }


def load_staged(model: nn.Module, named_tensors: Iterable[Any]) -> None:
    """SGLang's custom weight loader: copy the staged tensors into the model by the model's own `load_weights`.

    `named_tensors` is the request's (empty) list. SGLang lets an exception of a loader end the scheduler and, with TP,
    leaves the other ranks waiting; so the outcome is recorded for `status` and the caller asks for it.
    """
    staging, count = staging_of(model), 0
    staging.outcome = {"loaded": 0}

    def counted() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal count
        for name, tensor in staging.tensors.items():
            yield name, tensor
            count += 1

    try:
        if not staging.tensors:
            raise SlimxError("load was asked but nothing is staged; stage the buckets of this publication first")
        model.load_weights(counted())
        staging.outcome = {"loaded": count}
        staging.loaded.update(staging.checksums)
    except Exception as error:
        staging.outcome = {"loaded": count, "error": f"{type(error).__name__}: {error}"}
    staging.drop()


def verify(
    model: nn.Module, *, tensors: list[dict[str, str]] | None = None, checksum: Checksum = kernel_checksum
) -> Answer:
    """Compare what the model HOLDS now with `tensors` ([{name, checksum}]), or with all that was ever loaded here.

    Answer: `{"checked": count, "differ": [names], "unverified": [held names without a checksum]}`.
    """
    staging = staging_of(model)
    expected = staging.loaded if tensors is None else {entry["name"]: int(entry["checksum"], 16) for entry in tensors}
    places = staging.layout.places
    if unknown := [name for name in expected if name not in places]:
        raise SlimxError(f"verify: the model holds no tensor {unknown[0]}{_nearest(unknown[0], places)}")
    differ = [name for name, value in expected.items() if checksum(places[name].view().contiguous()) != value]
    return {"checked": len(expected), "differ": differ, "unverified": [name for name in places if name not in expected]}


def _check_entry(staging: Staging, entry: dict[str, Any], bucket: int, size: int) -> None:
    """Refuse, before a byte is read, what the model could not take."""
    name, place = entry["name"], staging.layout.places.get(entry["name"])
    if place is None:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is unknown to the model{_nearest(name, staging.layout.places)}"
        )
    offered, wanted = _describe(entry["dtype"], entry["shape"]), _describe(place.parameter.dtype, place.shape)
    if offered != wanted:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is {offered}, the model loads {wanted}; convert it before publishing"
        )
    if name in staging.tensors:
        raise SlimxError(f"tensor {name} of bucket {bucket} is staged already; send each tensor once, or abort first")
    nbytes = place.parameter.element_size() * torch.Size(place.shape).numel()
    if entry["nbytes"] != nbytes or not 0 <= entry["offset"] <= size - nbytes:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} claims bytes {entry['offset']} + {entry['nbytes']} of {size}, "
            f"but needs {nbytes}"
        )


def _map(fd_path: str, size: int, bucket: int) -> mmap.mmap:
    """The publisher's memory file, mapped privately: its pages are shared, and nothing here could write to them."""
    try:
        fd = os.open(fd_path, os.O_RDONLY)
    except OSError as error:
        raise SlimxError(
            f"bucket {bucket} at {fd_path} cannot be opened ({error.strerror}); "
            "publisher and engine must share a machine and a user"
        ) from None
    try:
        if (held := os.fstat(fd).st_size) < size:
            raise SlimxError(f"bucket {bucket} at {fd_path} has {held} bytes, {size} were announced; publish again")
        # torch.frombuffer warns about read-only buffers; a private writable mapping is as safe and silent.
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _describe(dtype: torch.dtype | str, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}:{','.join(map(str, shape))}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest that it holds is {close[0]}" if close else "; it holds nothing of a similar name"

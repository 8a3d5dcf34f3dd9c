"""A rank's own state as bytes, to be kept in another process and taken back by the rank that follows it.

    bytes = length | skeleton | tensors, one after the other

The skeleton is the state as a checkpoint structures it, with a number in place of each tensor. It fits ranks of one
layout only, and nothing of it is run as code. Unlike a checkpoint's shards the bytes need no other rank's: replicas are
in each of them.
"""

from __future__ import annotations

import io
import math
import threading
from typing import Any

import numpy as np
import ray
import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from slimx.extras.recovery.mirror_store import CHUNK, MirrorLost
from slimx.models.files.safe_pickle import safe_classes

_ALIGNED = 64
_MARK = "slimx tensor "
_LENGTH = 8
"""Bytes of the length of the skeleton."""


class Mirror:
    """Copies this rank's state and sends it behind the rank's back."""

    def __init__(self, rank: int, deadline_s: float):
        self.rank, self.deadline_s, self.holder = rank, deadline_s, f"trainer rank {rank}"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._fetched: tuple[int, torch.Tensor] | None = None

    def send(self, store: Any, step: int, state: dict[str, Any]) -> None:
        """Copy `state`, that after `step` steps, and begin to send it to `store`. Returns when it may change again;
        `store` tells whether it is whole."""
        if self._thread is not None:
            self._thread.join(self.deadline_s)
            if self._thread.is_alive():
                raise MirrorLost(
                    f"{self.holder} is still sending the mirror before",
                    code="mirror.busy",
                    about=self.holder,
                )
        data = self.copied(state).numpy()
        self._thread = threading.Thread(target=self._send, args=(store, step, data), name="mirror", daemon=True)
        self._thread.start()

    def fetch(self, store: Any, step: int) -> None:
        """Bring the bytes of this rank after `step` here. Raises MirrorLost if they cannot be had as they were."""
        size, digest = self._ask(store.describe.remote(step, self.rank))
        data = np.empty(size, np.uint8)
        for start in range(0, size, CHUNK):
            data[start : start + CHUNK] = self._ask(store.read.remote(step, self.rank, start))
        if (found := xxhash.xxh3_128_hexdigest(data)) != digest:
            raise MirrorLost(
                f"the mirrored state of {self.holder} after step {step} came with the digest {found} "
                f"instead of {digest}",
                code="mirror.differs",
                about=self.holder,
            )
        self._fetched = step, torch.from_numpy(data)

    def fetched(self, step: int) -> torch.Tensor:
        """Give the bytes that `fetch` has brought, and keep them no longer."""
        assert self._fetched is not None and self._fetched[0] == step
        (_, data), self._fetched = self._fetched, None
        return data

    def copied(self, state: dict[str, Any]) -> torch.Tensor:
        """The bytes of `state`, in memory that is kept from mirror to mirror."""
        tensors: list[torch.Tensor] = []
        written = io.BytesIO()
        torch.save((skeleton_of(state, tensors), [(str(t.dtype), tuple(t.shape)) for t in tensors]), written)
        head = torch.frombuffer(bytearray(written.getbuffer()), dtype=torch.uint8)
        places, size = _places(tensors, _LENGTH + len(head))
        if len(self._memory) != size:
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        memory = self._memory
        memory[:_LENGTH].view(torch.int64).fill_(len(head))
        memory[_LENGTH : _LENGTH + len(head)].copy_(head)
        for tensor, at in zip(tensors, places, strict=True):
            _view(memory, at, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
        if memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        return memory

    def _send(self, store: Any, step: int, data: np.ndarray) -> None:
        """The thread's work. A failure is printed: the driver asks the store alone."""
        try:
            self._ask(store.begin.remote(step, self.rank, len(data)))
            for start in range(0, len(data), CHUNK):
                self._ask(store.write.remote(step, self.rank, data[start : start + CHUNK]))
            self._ask(store.finish.remote(step, self.rank, xxhash.xxh3_128_hexdigest(data)))
        except Exception as error:
            print(f"slimx: the state after step {step} was not mirrored: {error}", flush=True)

    def _ask(self, reference: Any) -> Any:
        """The store's answer. Raises MirrorLost if there is none in time, or none any more."""
        try:
            return ray.get(reference, timeout=self.deadline_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, MirrorLost):
                raise cause from None
            raise MirrorLost(
                f"{self.holder}: the process that keeps its mirror does not answer ({type(error).__name__})",
                code="mirror.lost",
                about=self.holder,
            ) from None


def read_back(data: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The values of the bytes `data`, uint8 [size], structured as `state` is, a state that is to be loaded: its tensors
    are written over."""
    length = int(data[:_LENGTH].view(torch.int64))
    with safe_classes(io.BytesIO):
        head = io.BytesIO(data[_LENGTH : _LENGTH + length].numpy())
        skeleton, forms = torch.load(head, weights_only=True)
    tensors, at = [], _LENGTH + length
    for dtype, shape in forms:
        at = _aligned(at)
        tensors.append(_view(data, at, getattr(torch, dtype.removeprefix("torch.")), shape))
        at += tensors[-1].nbytes
    return _merged(skeleton, state, tensors)


def skeleton_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with the number of a tensor of `tensors`, to which it is added, in place of each one that is sharded."""
    if isinstance(value, dict):
        return {key: skeleton_of(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [skeleton_of(each, tensors) for each in value]
    if isinstance(value, ShardedObject):
        return value.data
    if isinstance(value, LocalNonpersistentObject):
        return None
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        value = value.data.detach()
    if not isinstance(value, torch.Tensor):
        return value
    tensors.append(value)
    return f"{_MARK}{len(tensors) - 1}"


def _merged(saved: Any, state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    if isinstance(state, ShardedObject):
        return saved
    if isinstance(saved, dict):
        mine = state if isinstance(state, dict) else {}
        return {key: _merged(each, mine.get(key), tensors) for key, each in saved.items()}
    if isinstance(saved, list):
        mine = state if isinstance(state, list) and len(state) == len(saved) else [None] * len(saved)
        return [_merged(each, own, tensors) for each, own in zip(saved, mine, strict=True)]
    if not (isinstance(saved, str) and saved.startswith(_MARK)):
        return saved
    tensor = tensors[int(saved.removeprefix(_MARK))]
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        with torch.no_grad():
            return state.data.detach().copy_(tensor)
    return tensor.clone()


def _places(tensors: list[torch.Tensor], start: int) -> tuple[list[int], int]:
    """The offset of each tensor, and the end of the last one."""
    places, at = [], start
    for tensor in tensors:
        at = _aligned(at)
        places.append(at)
        at += tensor.nbytes
    return places, at


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED


def _view(memory: torch.Tensor, at: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

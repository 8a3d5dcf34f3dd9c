"""Mirror of a rank: its state as bytes, stored in another process, from which the rank's replacement restores it.

    bytes = length | skeleton | tensors, one after the other

The skeleton is the state in the structure of a checkpoint, with an index in place of each tensor. It is valid only for
ranks of the same layout, and is loaded without executing code. Unlike the shards of a checkpoint, the bytes of a rank
are complete: they include replicated tensors.
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
"""Size in bytes of the field that stores the skeleton's length."""


class Mirror:
    """Sender and receiver of this rank's mirrors. Sending takes place in the background."""

    def __init__(self, rank: int, deadline_s: float):
        self.rank = rank
        self.deadline_s = deadline_s
        self.holder = f"trainer rank {rank}"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._fetched: tuple[int, torch.Tensor] | None = None

    def send(self, store: Any, step: int, state: dict[str, Any]) -> None:
        """Copies `state`, the state after `step` steps, and starts sending the copy to `store`. When this returns,
        `state` may be changed; `store` reports when the copy is complete. Raises MirrorLost if the previous mirror is
        still being sent."""
        if self._thread is not None:
            self._thread.join(self.deadline_s)
            if self._thread.is_alive():
                raise MirrorLost(
                    f"{self.holder} is still sending the previous copy of its state after {self.deadline_s} s, so the "
                    "next copy is skipped; raise recovery.mirror_every, or check the network for errors",
                    code="mirror.busy",
                    about=self.holder,
                )
        data = self.copied(state).numpy()
        self._thread = threading.Thread(target=self._send, args=(store, step, data), name="mirror", daemon=True)
        self._thread.start()

    def fetch(self, store: Any, step: int) -> None:
        """Reads from `store` the bytes of this rank's state after `step` steps. Raises MirrorLost if the bytes are
        missing or have changed."""
        size, digest = self._ask(store.describe.remote(step, self.rank))
        data = np.empty(size, np.uint8)
        for start in range(0, size, CHUNK):
            data[start : start + CHUNK] = self._ask(store.read.remote(step, self.rank, start))
        received = xxhash.xxh3_128_hexdigest(data)
        if received != digest:
            raise MirrorLost(
                f"the mirrored state of {self.holder} after step {step} was received with digest {received} instead "
                f"of {digest}, so bytes were changed in transit; check the network and host memory for errors",
                code="mirror.differs",
                about=self.holder,
            )
        self._fetched = step, torch.from_numpy(data)

    def fetched(self, step: int) -> torch.Tensor:
        """Returns the bytes that `fetch` has read, and releases them."""
        assert self._fetched is not None and self._fetched[0] == step
        data = self._fetched[1]
        self._fetched = None
        return data

    def copied(self, state: dict[str, Any]) -> torch.Tensor:
        """Copies `state` as bytes to a buffer that is reused for each mirror, and returns the buffer."""
        tensors: list[torch.Tensor] = []
        buffer = io.BytesIO()
        torch.save((skeleton_of(state, tensors), [(str(t.dtype), tuple(t.shape)) for t in tensors]), buffer)
        head = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        offsets, size = _offsets(tensors, _LENGTH + len(head))
        if len(self._memory) != size:
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        memory = self._memory
        memory[:_LENGTH].view(torch.int64).fill_(len(head))
        memory[_LENGTH : _LENGTH + len(head)].copy_(head)
        for tensor, offset in zip(tensors, offsets, strict=True):
            _view(memory, offset, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
        if memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        return memory

    def _send(self, store: Any, step: int, data: np.ndarray) -> None:
        """Sends the state after `step` steps to `store`, in a background thread. Failures are printed rather than
        raised, because the driver asks only the store which states are complete."""
        try:
            self._ask(store.begin.remote(step, self.rank, len(data)))
            for start in range(0, len(data), CHUNK):
                self._ask(store.write.remote(step, self.rank, data[start : start + CHUNK]))
            self._ask(store.finish.remote(step, self.rank, xxhash.xxh3_128_hexdigest(data)))
        except Exception as error:
            print(f"slimx: the state after step {step} was not mirrored: {error}", flush=True)

    def _ask(self, reference: Any) -> Any:
        """Returns the store's response. Raises MirrorLost if there is none within `deadline_s`, or if the store is
        lost."""
        try:
            return ray.get(reference, timeout=self.deadline_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, MirrorLost):
                raise cause from None
            raise MirrorLost(
                f"the process that stores the mirror of {self.holder} does not respond ({type(error).__name__}); "
                "check that the node of this process is up and has free memory",
                code="mirror.lost",
                about=self.holder,
            ) from None


def read_back(data: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Decodes the bytes `data`, uint8 [size], to a state with the structure of `state`, and returns the decoded state.
    The sharded tensors of `state` are overwritten."""
    length = int(data[:_LENGTH].view(torch.int64))
    with safe_classes(io.BytesIO):
        head = io.BytesIO(data[_LENGTH : _LENGTH + length].numpy())
        skeleton, forms = torch.load(head, weights_only=True)
    tensors: list[torch.Tensor] = []
    offset = _LENGTH + length
    for dtype, shape in forms:
        offset = _aligned(offset)
        tensors.append(_view(data, offset, getattr(torch, dtype.removeprefix("torch.")), shape))
        offset += tensors[-1].nbytes
    return _merged(skeleton, state, tensors)


def skeleton_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns `value` with each tensor replaced by its index in `tensors`, to which the tensors are appended."""
    if isinstance(value, dict):
        return {key: skeleton_of(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [skeleton_of(item, tensors) for item in value]
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
        state_items = state if isinstance(state, dict) else {}
        return {key: _merged(item, state_items.get(key), tensors) for key, item in saved.items()}
    if isinstance(saved, list):
        same_length = isinstance(state, list) and len(state) == len(saved)
        states = state if same_length else [None] * len(saved)
        return [_merged(item, item_state, tensors) for item, item_state in zip(saved, states, strict=True)]
    if not (isinstance(saved, str) and saved.startswith(_MARK)):
        return saved
    tensor = tensors[int(saved.removeprefix(_MARK))]
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        with torch.no_grad():
            return state.data.detach().copy_(tensor)
    return tensor.clone()


def _offsets(tensors: list[torch.Tensor], start: int) -> tuple[list[int], int]:
    """Returns each tensor's aligned offset in bytes, and the offset at which the last tensor ends. `start`: offset at
    which the data before the tensors ends."""
    offsets = []
    end = start
    for tensor in tensors:
        offset = _aligned(end)
        offsets.append(offset)
        end = offset + tensor.nbytes
    return offsets, end


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _view(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    return memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

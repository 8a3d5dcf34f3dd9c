"""Packs one rank's weights into buckets for engines and files, as specified by a plan ("publish", "adapters" or
"export").

A rank runs its operations one after the other. So once all ranks have returned from the `release` that ends a
publication, no rank is still writing into a bucket.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from slimx.errors import SlimxError
from slimx.models.files.writer import write_bucket
from slimx.reshard.pack.gather import Gatherer
from slimx.reshard.pack.gather_device import DeviceGatherer
from slimx.reshard.pack.packer import Contribution, Packer
from slimx.reshard.packed import ON_DEVICE, PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.transports.device import DeviceMemory, fetch
from slimx.reshard.transports.memory import MemoryFile, open_memory
from slimx.trainer.device.memory import PhasePeaks
from slimx.trainer.operation import operation
from slimx.trainer.trained_model import TrainedModel

PROBE_BYTES = 16
"""Size in bytes of the memory that a rank allocates for other ranks to test whether they can open it."""


class WeightExport:
    """Writes this rank's part of the weights into the buckets of publications and exports."""

    def __init__(self, model: TrainedModel, memory: PhasePeaks):
        self.model = model
        self._memory = memory
        self.rank = model.parallel.rank
        self.device = model.parallel.device
        self._gatherers: dict[str, Gatherer | DeviceGatherer] = {}
        self._probe: DeviceMemory | MemoryFile | None = None
        model.on_moved.append(self._refresh_addresses)

    def _refresh_addresses(self) -> None:
        for gatherer in self._gatherers.values():
            gatherer.packer.refresh_addresses()

    def reload(self, *, training: bool = True) -> None:
        """Moves the model's weights to the device and, if `training` is true, its gradients and optimizer state as
        well."""
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Releases the memory of all buckets."""
        for gatherer in self._gatherers.values():
            gatherer.close()

    # Buckets ----------------------------------------------------------------------------------------------------------

    @operation()
    def probe(self, *, on_device: bool) -> tuple[str, bytes]:
        """Allocates memory on this rank's GPU or on the host, and writes random bytes into it. Returns the path under
        which other ranks can open the memory, and the bytes, which other ranks pass to `reaches`."""
        self._probe = DeviceMemory(PROBE_BYTES, self.device) if on_device else MemoryFile(PROBE_BYTES)
        # Random bytes, because on another host the same path may belong to the memory of another rank.
        content = secrets.token_bytes(PROBE_BYTES)
        self._probe.bytes.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if on_device:
            torch.cuda.current_stream().synchronize()  # because other processes do not wait for this stream
        return self._probe.path, content

    @operation()
    def reaches(self, *, path: str, content: bytes) -> bool:
        """Returns True if this rank can open the memory of another rank's probe. For this, both ranks must be on the
        same host and in the same namespace, and, for GPU memory, the ranks' GPUs must be able to access each other.
        `path` and `content`: result of `probe`."""
        try:
            if path.startswith(ON_DEVICE):
                memory = fetch(path, 0, PROBE_BYTES, self.device)
            else:
                memory = open_memory(path, PROBE_BYTES)
            return bytes(memory.tolist()) == content
        except SlimxError:
            return False

    @operation()
    def prepare(self, *, name: str, plan: bytes, remote: Sequence[int], on_device: bool, holders: int = 1) -> None:
        """Prepares the buckets of a plan. `name`: name of the plan. `plan`: the encoded `Plan`.

        `remote`: ranks that cannot open the publisher's memory. `on_device`: True if buckets are in GPU memory.
        `holders`: number of ranks whose memory contains buckets; if there are several, each engine rank's part of a
        bucket has separate memory."""
        weights = self.model.weights
        copy_plan = Plan.from_bytes(plan)
        parameters, derived = weights.attached.leaving(name, copy_plan, self.rank, weights.parameters)
        packer = Packer(copy_plan, self.rank, parameters, derived=derived, apart=holders > 1)
        if on_device:  # None: NCCL's default group of all ranks
            self._gatherers[name] = DeviceGatherer(packer, remote=remote, group=None, holders=holders)
        else:
            group = self.model.parallel.host_group
            self._gatherers[name] = Gatherer(packer, remote=remote, group=group, holders=holders)

    @operation()
    def open(self, *, name: str, bucket: int) -> dict[int, str]:
        """Allocates this rank's memory for a bucket, and returns {part: path} for the bucket's parts in that memory."""
        return self._gatherers[name].open(bucket)

    @operation()
    def fill(self, *, name: str, bucket: int, paths: Sequence[str]) -> Contribution:
        """Writes this rank's part of a bucket into the memory at `paths`, one path for each part of the bucket."""
        with self._memory.phase("export" if name == "export" else "publish"):
            self.reload(training=False)
            return self._gatherers[name].fill(bucket, paths)

    @operation()
    def release(self, *, name: str, bucket: int | None) -> None:
        """Allows this rank's memory for a bucket to be reused. `bucket`=None ends the publication, and must be passed
        on all ranks."""
        self._gatherers[name].release(bucket)

    @operation()
    def write_bucket(self, *, packed: PackedBucket, path: str) -> list[str]:
        """Writes a packed bucket into the safetensors file `path`, and returns the names of its tensors."""
        return write_bucket(packed, path, self.model.weights.spec.table)

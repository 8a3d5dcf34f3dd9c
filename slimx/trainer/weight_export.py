"""The way of one rank's weights to engines and files: by a plan ("publish", "adapters" or "export"), bucket by bucket.

Operations of a rank run one after another: once all ranks have answered `release` of a whole publication, none still
fills a bucket.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.models.files.writer import write_bucket
from slimx.reshard.pack.gather import Gatherer
from slimx.reshard.pack.gather_device import DeviceGatherer
from slimx.reshard.pack.packer import Packer
from slimx.reshard.packed import ON_DEVICE, PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.transports.device import DeviceMemory, fetch
from slimx.reshard.transports.memory import MemoryFile, open_memory
from slimx.trainer.device.memory import PhaseMemory
from slimx.trainer.operation import operation
from slimx.trainer.trained import TrainedModel

PROBE_BYTES = 16


class WeightExport:
    """Packs this rank's share of the weights, and writes versions and exports of them."""

    def __init__(self, model: TrainedModel, memory: PhaseMemory):
        self.model, self._memory = model, memory
        self.rank, self.device = model.parallel.rank, model.parallel.device
        self._gatherers: dict[str, Gatherer | DeviceGatherer] = {}
        self._probe: DeviceMemory | MemoryFile | None = None
        model.on_moved.append(self._refresh_addresses)

    def _refresh_addresses(self) -> None:
        for gatherer in self._gatherers.values():
            gatherer.packer.refresh_addresses()

    def reload(self, *, training: bool = True) -> None:
        """Bring the model to the device."""
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Give the buckets' memory back."""
        for gatherer in self._gatherers.values():
            gatherer.close()

    # Buckets ----------------------------------------------------------------------------------------------------------

    @operation()
    def probe(self, *, on_device: bool) -> tuple[str, bytes]:
        """Memory, of this rank's GPU or the host's, that other ranks try to open: its path, and its content."""
        self._probe = DeviceMemory(PROBE_BYTES, self.device) if on_device else MemoryFile(PROBE_BYTES)
        # At random: on another machine the same path may be another rank's.
        content = secrets.token_bytes(PROBE_BYTES)
        self._probe.bytes.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if on_device:
            torch.cuda.current_stream().synchronize()  # other processes wait for no stream of this one
        return self._probe.path, content

    @operation()
    def reaches(self, *, path: str, content: bytes) -> bool:
        """Returns True if this rank can write into the memory that another one probes with: on the same machine, in the
        same namespace, and for a GPU's memory within reach of this rank's GPU."""
        try:
            if path.startswith(ON_DEVICE):
                found = fetch(path, 0, PROBE_BYTES, self.device)
            else:
                found = open_memory(path, PROBE_BYTES)
            return bytes(found.tolist()) == content
        except SlimxError:
            return False

    @operation()
    def prepare(self, *, name: str, plan: bytes, remote: Sequence[int], on_device: bool, holders: int = 1) -> None:
        """Get ready for the buckets of a plan.

        `remote`: ranks that cannot reach the publisher's memory. `on_device`: that is its GPU's. `holders`: ranks whose
        memory buckets are in; with more than the publisher, each engine rank's part of a bucket is in memory of its
        own."""
        weights = self.model.weights
        whole = Plan.from_bytes(plan)
        parameters, made = weights.attached.leaving(name, whole, self.rank, weights.parameters)
        packer = Packer(whole, self.rank, parameters, made=made, apart=holders > 1)
        if on_device:  # the default group: NCCL over all ranks
            self._gatherers[name] = DeviceGatherer(packer, remote=remote, group=None, holders=holders)
        else:
            group = self.model.parallel.host_group
            self._gatherers[name] = Gatherer(packer, remote=remote, group=group, holders=holders)

    @operation()
    def open(self, *, name: str, bucket: int) -> dict[int, str]:
        """The paths of this rank's own memory for a bucket, by part of it."""
        return self._gatherers[name].open(bucket)

    @operation()
    def fill(self, *, name: str, bucket: int, paths: Sequence[str]) -> Any:
        """Write this rank's share of a bucket into the memories at `paths`."""
        with self._memory.phase("export" if name == "export" else "publish"):
            self.reload(training=False)
            return self._gatherers[name].fill(bucket, paths)

    @operation()
    def release(self, *, name: str, bucket: int | None) -> None:
        """Let this rank's memory of one bucket be used again; None, for all ranks: a publication has ended."""
        self._gatherers[name].release(bucket)

    @operation()
    def write_bucket(self, *, packed: PackedBucket, path: str) -> list[str]:
        """Write a packed bucket as a safetensors file; its tensors' names."""
        return write_bucket(packed, path, self.model.weights.spec.table)

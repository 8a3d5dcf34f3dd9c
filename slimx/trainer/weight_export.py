"""Export of one rank's weights to engines and files: by a plan ("publish", "adapters" or "export"), bucket by bucket.

Operations of a rank run sequentially: once all ranks have answered `release` of a complete publication, none is still
filling a bucket.
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
"""Size of the memory that ranks open to test whether they reach each other."""


class WeightExport:
    """Packs this rank's part of the weights for publications and exports."""

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
        """Moves the model to the device."""
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Releases the buckets' memory."""
        for gatherer in self._gatherers.values():
            gatherer.close()

    # Buckets ----------------------------------------------------------------------------------------------------------

    @operation()
    def probe(self, *, on_device: bool) -> tuple[str, bytes]:
        """Allocates memory, of this rank's GPU or the host's, for other ranks to open; returns its path and content."""
        self._probe = DeviceMemory(PROBE_BYTES, self.device) if on_device else MemoryFile(PROBE_BYTES)
        # Random: on another host the same path may be another rank's memory.
        content = secrets.token_bytes(PROBE_BYTES)
        self._probe.bytes.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if on_device:
            torch.cuda.current_stream().synchronize()  # other processes do not wait for this process's streams
        return self._probe.path, content

    @operation()
    def reaches(self, *, path: str, content: bytes) -> bool:
        """Returns True if this rank can write to the memory of another rank's probe: on the same host, in the same
        namespace, and for GPU memory within reach of this rank's GPU."""
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
        """Prepares for the buckets of a plan.

        `remote`: ranks that cannot reach the publisher's memory. `on_device`: whether that is GPU memory. `holders`:
        ranks in whose memory buckets are stored; if there are several, each engine rank's part of a bucket has its
        separate memory."""
        weights = self.model.weights
        copy_plan = Plan.from_bytes(plan)
        parameters, made = weights.attached.leaving(name, copy_plan, self.rank, weights.parameters)
        packer = Packer(copy_plan, self.rank, parameters, made=made, apart=holders > 1)
        if on_device:  # the default group: NCCL over all ranks
            self._gatherers[name] = DeviceGatherer(packer, remote=remote, group=None, holders=holders)
        else:
            group = self.model.parallel.host_group
            self._gatherers[name] = Gatherer(packer, remote=remote, group=group, holders=holders)

    @operation()
    def open(self, *, name: str, bucket: int) -> dict[int, str]:
        """Returns the paths of this rank's memory for a bucket, by part of it."""
        return self._gatherers[name].open(bucket)

    @operation()
    def fill(self, *, name: str, bucket: int, paths: Sequence[str]) -> Contribution:
        """Writes this rank's part of a bucket to each memory region in `paths`."""
        with self._memory.phase("export" if name == "export" else "publish"):
            self.reload(training=False)
            return self._gatherers[name].fill(bucket, paths)

    @operation()
    def release(self, *, name: str, bucket: int | None) -> None:
        """Makes this rank's memory of one bucket reusable; None, on all ranks: a publication has ended."""
        self._gatherers[name].release(bucket)

    @operation()
    def write_bucket(self, *, packed: PackedBucket, path: str) -> list[str]:
        """Writes a packed bucket as a safetensors file; returns its tensors' names."""
        return write_bucket(packed, path, self.model.weights.spec.table)

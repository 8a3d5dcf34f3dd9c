"""The process entry of one trainer rank: adapters first, then torch.distributed, then the trainer.

Imported by Ray's worker process; torch and megatron-core are imported in the constructor only, after the adapters.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimx.runtime.logs import marked
from slimx.runtime.machine import machine
from slimx.runtime.ports import address, free_port, is_loopback, own_address
from slimx.trainer.process import install_adapters, prepare_process, redirect_output

PROBE_BYTES = 16


class TrainerWorker:
    """One rank as a Ray actor. The group calls every method on all ranks together."""

    def __init__(self, rank: int, config: dict[str, Any], log_path: str, device: str):
        """`config`: a dumped `Config`; everything the process prints goes to `log_path`."""
        redirect_output(log_path)
        self.rank, self.device = rank, device
        self._values = config
        self._config: Any = None
        """The same as a `Config`, from the start on."""
        self._trainer: Any = None
        self._critic: Any = None
        self._parallel: Any = None
        self._gatherers: dict[str, Any] = {}
        self._sender: Any = None
        self._shelf: Any = None
        self._probe: Any = None
        self._memory: Any = None
        self._guard: Any = None

    def ping(self) -> None:
        """Answer when all earlier calls are done. Raises the error of a save in the background that could not be
        reported in the checkpoint's directory."""
        for part in (self._trainer, self._critic):
            if part is not None and part.saver.failure is not None:
                raise part.saver.failure

    def mark(self, text: str) -> None:
        """Write into the log what the lines that follow belong to."""
        print(marked(f"rank {self.rank}, {text}"), flush=True)

    def rendezvous(self) -> str:
        """Address on this rank's node at which all ranks meet: an init_method for torch.distributed."""
        from slimx.config.sections.run import Cluster

        host = own_address(Cluster.model_validate(self._values["cluster"]).network)
        return f"tcp://{address(host, free_port(host))}"

    def start(self, init_method: str) -> dict[str, Any]:
        """Join the other ranks, build the model, load the weights; returns this rank's pid, its machine, adapters in
        force, contract of exact mode (None in fast mode), seconds of imports, meeting and model; on CUDA the UUID of
        its GPU and the number of its CPUs."""
        clock = [time.perf_counter()]
        from slimx.config.schema import CHECKED, Config

        config = self._config = Config.model_validate(self._values, context=CHECKED)
        local = is_loopback(urlsplit(init_method).hostname or "")
        shares = config.trainer.tensor * config.trainer.context > 1
        fp8, deep_ep = config.trainer.fp8 is not None, config.trainer.moe.dispatcher == "flex"
        prepare_process(
            self.device,
            shares_layers=shares,
            local=local,
            fp8=fp8,
            deep_ep=deep_ep,
            waiting=bool(config.trainer.offload_activations),
        )
        adapters = install_adapters(exact=config.exact, deep_ep=deep_ep)
        import torch

        import slimx.trainer.trainer  # noqa: F401 - what `_build` needs counts among the imports, not as the model
        from slimx.layout.ranks import sizes_of
        from slimx.trainer.contract import contract_of
        from slimx.trainer.device.memory import PhaseMemory, meter_of
        from slimx.trainer.parallel import ParallelState

        torch.set_num_threads(config.trainer.threads)
        device = torch.device(self.device)
        place = self._look_at_gpu(config, device) if device.type == "cuda" else {}
        self._memory = PhaseMemory(meter_of(device), "generate" if config.rollout.policy_engines else "wait")
        clock.append(time.perf_counter())
        self._parallel = ParallelState(
            sizes_of(config.trainer),
            rank=self.rank,
            init_method=init_method,
            device=device,
            deadline_s=config.trainer.deadline,
            seed=config.run.seed,
        )
        clock.append(time.perf_counter())
        self._build(config)
        clock.append(time.perf_counter())
        took = [late - early for early, late in pairwise(clock)]
        return {
            "pid": os.getpid(),
            "seconds": dict(zip(("imports", "meeting", "model"), took, strict=True)),
            "machine": machine(),
            "adapters": adapters,
            "numerics": contract_of(config, self.device),
            **place,
        }

    def _look_at_gpu(self, config: Any, device: Any) -> dict[str, Any]:
        """Refuse a broken GPU, run on the CPUs beside it, and guard its memory from now on."""
        import torch

        from slimx.trainer.device.gpu import MemoryGuard, check_health, set_affinity
        from slimx.trainer.device.nvml import gpu_of

        gpu = gpu_of(device)
        warnings = check_health(gpu)
        cpus = set_affinity(gpu) if config.cluster.cpu_affinity == "auto" else os.sched_getaffinity(0)
        for line in (*warnings, f"rank {self.rank}: {gpu.uuid}, on {len(cpus)} CPUs"):
            print(f"slimx: {line}", flush=True)
        self._guard = MemoryGuard(gpu, config.trainer.memory_margin_mib * 2**20, free_caches=torch.cuda.empty_cache)
        return {"gpu": gpu.uuid, "cpus": len(cpus)}

    def _build(self, config: Any) -> None:
        """The policy, and the critic if it shares these ranks; or a reward model."""
        from slimx.models.families import configured_model

        spec = configured_model(config)
        if config.algorithm.scores:
            from slimx.trainer.reward_model import RewardModelTrainer

            self._trainer = RewardModelTrainer(config, spec, self._parallel)
            return
        from slimx.trainer.trainer import PolicyTrainer

        self._trainer = PolicyTrainer(config, spec, self._parallel)
        if config.critic is not None and config.critic.placement == "shared":
            from slimx.trainer.critic import CriticTrainer

            self._critic = CriticTrainer(config, self._parallel)

    def train_step(self, updates: Any, step: int, version: int) -> dict[str, float]:
        with self._memory.phase("train"):
            self._resident()
            if self._guard is not None:
                self._guard.check(self._trainer.holds())
            return self._trainer.train_updates(updates, step=step, version=version)

    def trained_tokens(self) -> Any:
        return self._trainer.trained_tokens()

    def logprobs(self, batches: Any, under: str = "policy") -> Any:
        with self._memory.phase("logprobs"):
            self._resident(training=False)
            return self._trainer.logprobs(batches, under=under)

    def refresh_reference(self, path: str | None = None) -> None:
        """The reference becomes the weights in the directory `path`; None: the present ones."""
        self._resident(training=False)
        if path is None:
            self._trainer.passes.refresh_reference()
        else:
            self._trainer.passes.load_reference(path)

    def measure_gap(self, batches: Any, version: int, mismatch: bool) -> dict[str, float]:
        with self._memory.phase("probe"):
            self._resident(training=False)
            return self._trainer.measure_gap(batches, version=version, mismatch=mismatch)

    def trace(self, batches: Any) -> dict[str, list[str]]:
        self._resident(training=False)
        return self._trainer.trace(batches)

    def save(self, path: str, step: int) -> None:
        with self._memory.phase("save"):
            self._resident()
            self._trainer.save(path, step=step)

    def restore(self, path: str, same_layout: bool, load_optimizer: bool) -> None:
        with self._memory.phase("restore"):
            self._resident()
            self._trainer.restore(path, same_layout=same_layout, load_optimizer=load_optimizer)

    def mirror(self, store: Any, step: int) -> None:
        """Copy the state after `step` steps and begin to send it to `store`, a `MirrorStore`."""
        with self._memory.phase("mirror"):
            self._resident()
            self._trainer.mirror(store, step)

    def fetch_mirror(self, store: Any, step: int) -> None:
        """Bring what this rank's predecessor sent to `store` after `step` steps here."""
        with self._memory.phase("restore"):
            self._trainer.mirrored.fetch(store, step)

    def restore_mirror(self, step: int) -> None:
        """Take the state that `fetch_mirror` has brought."""
        with self._memory.phase("restore"):
            self._resident()
            self._trainer.restore_mirrored(step)

    def memory(self) -> dict[str, float]:
        """Return `memory/PHASE_peak_mib` of this rank since the last call, in MiB."""
        return self._memory.take()

    def check_files(self, path: str, records: bytes) -> None:
        """Compare files of the checkpoint `path` with their records, name by name; raises SlimxError naming one."""
        from slimx.trainer.checkpoint.files import check_digests, decode_records

        check_digests(Path(path), decode_records(records))

    def scores(self, batches: Any) -> Any:
        """Score every position by a reward model."""
        with self._memory.phase("values"):
            self._resident(training=False)
            return self._trainer.values(batches)

    def score_head(self) -> Any:
        """Give the head of a reward model, on the last pipeline stage; None elsewhere."""
        self._resident(training=False)
        return self._trainer.head()

    # The critic, where these ranks hold one ------------------------------------------------------------------------

    def critic_values(self, batches: Any) -> Any:
        with self._memory.phase("values"):
            self._critic.offloading.reload()
            return self._critic.values(batches)

    def critic_step(self, updates: Any, step: int) -> dict[str, float]:
        with self._memory.phase("train"):
            self._critic.offloading.reload()
            return self._critic.train_updates(updates, step=step)

    def critic_save(self, path: str, step: int) -> None:
        with self._memory.phase("save"):
            self._critic.offloading.reload()
            self._critic.save(path, step=step)

    def critic_restore(self, path: str, same_layout: bool, load_optimizer: bool) -> None:
        self._critic.restore(path, same_layout=same_layout, load_optimizer=load_optimizer)

    # Weights leave by a plan ("publish", "adapters" or "export"), bucket by bucket ---------------------------------

    def probe(self, on_device: bool) -> tuple[str, bytes]:
        """Memory, of this rank's GPU or the host's, that other ranks try to open: its path, and what is in it."""
        import torch

        from slimx.reshard.transports.device import DeviceMemory
        from slimx.reshard.transports.memory import MemoryFile

        self._probe = DeviceMemory(PROBE_BYTES, self._device()) if on_device else MemoryFile(PROBE_BYTES)
        # At random: on another machine the same path may be another rank's.
        content = secrets.token_bytes(PROBE_BYTES)
        self._probe.bytes.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if on_device:
            torch.cuda.current_stream().synchronize()  # other processes wait for no stream of this one
        return self._probe.path, content

    def reaches(self, path: str, content: bytes) -> bool:
        """Returns True if this rank can write into the memory that another one probes with: on the same machine, in the
        same namespace, and for a GPU's memory within reach of this rank's GPU."""
        from slimx.errors import SlimxError
        from slimx.reshard.packed import ON_DEVICE
        from slimx.reshard.transports.device import fetch
        from slimx.reshard.transports.memory import open_memory

        try:
            if path.startswith(ON_DEVICE):
                found = fetch(path, 0, PROBE_BYTES, self._device())
            else:
                found = open_memory(path, PROBE_BYTES)
            return bytes(found.tolist()) == content
        except SlimxError:
            return False

    def prepare(self, name: str, plan: bytes, remote: list[int], on_device: bool, holders: int = 1) -> None:
        """Get ready for the buckets of a plan; `remote`: the ranks that cannot reach the publisher's memory;
        `on_device`: whether that is its GPU's; `holders`: ranks whose memory buckets are in, if more than the
        publisher's each engine rank's part of one in memory of its own."""
        from slimx.reshard.pack.gather import Gatherer
        from slimx.reshard.pack.gather_device import DeviceGatherer
        from slimx.reshard.pack.packer import Packer
        from slimx.reshard.plan.copy_plan import Plan

        weights = self._trainer.weights
        alone = name != "export" and self._config.serves_adapters
        parameters, merging = (weights.unmerged, {}) if alone else (weights.parameters, weights.merging)
        packer = Packer(Plan.from_bytes(plan), self.rank, parameters, merging=merging, apart=holders > 1)
        if on_device:  # the default group: NCCL over all ranks
            self._gatherers[name] = DeviceGatherer(packer, remote=remote, group=None, holders=holders)
        else:
            group = self._trainer.parallel.host_group
            self._gatherers[name] = Gatherer(packer, remote=remote, group=group, holders=holders)

    def open_bucket(self, name: str, bucket: int) -> dict[int, str]:
        """The paths of this rank's own memory for a bucket, by part of it."""
        return self._gatherers[name].open(bucket)

    def fill_bucket(self, name: str, bucket: int, paths: Sequence[str]) -> Any:
        """Write this rank's share of a bucket into the memories at `paths`."""
        with self._memory.phase("export" if name == "export" else "publish"):
            self._resident(training=False)
            return self._gatherers[name].fill(bucket, paths)

    def release_buckets(self, name: str, bucket: int | None) -> None:
        """This rank's memory of one bucket may be used again. None, for all ranks: a publication has ended. Calls of a
        rank run one after another: when all have answered, none still fills a bucket."""
        self._gatherers[name].release(bucket)

    def begin_version(self, directory: str, manifest: Any) -> None:
        """Begin a version as files in `directory`: buckets are in this rank's memory."""
        from slimx.reshard.transports.disk import Shelf
        from slimx.reshard.transports.disk_changes import ChangesShelf

        if self._shelf is None:
            changes = self._config.publish.changes_on_disk
            self._shelf = Shelf(directory) if changes is None else ChangesShelf(directory, *changes)
        self._shelf.begin(manifest)

    def write_version(self, bucket: int, packed: Any) -> Any:
        """Write a bucket of the version; the same bucket as it lies in its file."""
        from slimx.reshard.transports.memory import open_memory

        with self._memory.phase("publish"):
            return self._shelf.add(bucket, packed, open_memory(packed.path, packed.size))

    def complete_version(self) -> None:
        self._shelf.commit()

    def prepare_direct(self, plan: bytes, edges: list[int], item: int, on_gpu: bool) -> None:
        """Get ready to write buckets of a dealt plan to all engines; `edges`, `item`, `on_gpu`: as in
        `slimx.reshard.direct.sender.Sender`."""
        from slimx.reshard.direct.sender import Sender
        from slimx.reshard.pack.packer import Packer
        from slimx.reshard.plan.copy_plan import Plan

        weights = self._trainer.weights
        packer = Packer(Plan.from_bytes(plan), self.rank, weights.parameters, merging=weights.merging)
        host = own_address(self._config.cluster.network)
        name = f"trainer rank {self.rank} ({os.getpid()})"
        self._sender = Sender(packer, name, host, edges=edges, item=item, on_gpu=on_gpu)

    def connect_direct(self, engine: int, offer: bytes) -> None:
        """Get to know the memory that `engine` offers (`slimx.reshard.direct.offer.Offer`)."""
        from slimx.reshard.direct.offer import Offer

        self._sender.connect(engine, Offer.from_bytes(offer))

    def send_direct(self, bucket: int, transfer: int, engines: dict[int, int]) -> Any:
        """Pack this rank's part of a bucket and begin to write it to `engines`: see `Sender.send`."""
        with self._memory.phase("publish"):
            self._resident(training=False)
            return self._sender.send(bucket, transfer, engines)

    def write_bucket(self, packed: Any, path: str) -> list[str]:
        """Write a packed bucket as a safetensors file; its tensors' names."""
        from slimx.models.files.writer import write_bucket

        return write_bucket(packed, path, self._trainer.weights.spec.table)

    def offload(self, weights: bool = True) -> None:
        """Give the device's memory back to engines on it; `weights`: those of the policy too."""
        for gatherer in self._gatherers.values():
            gatherer.close()
        self._trainer.offload(weights=weights)
        if self._critic is not None and self._trainer.config.trainer.offload:
            self._critic.offloading.offload()

    def reload(self) -> None:
        """Take back what `offload` gave away."""
        self._resident()
        if self._critic is not None:
            self._critic.offloading.reload()

    def _resident(self, *, training: bool = True) -> None:
        """Bring back what a call needs if it is not on the device; `training`: gradients and optimizer state too."""
        if self._trainer.offloading.away:
            self._trainer.reload(training=training)
            for gatherer in self._gatherers.values():
                gatherer.packer.refresh_addresses()
            if self._sender is not None:
                self._sender.packer.refresh_addresses()

    def _device(self) -> Any:
        return self._trainer.parallel.device

    def stop(self) -> None:
        """Leave the process groups."""
        if self._parallel is not None:
            self._parallel.destroy()


class CriticWorker(TrainerWorker):
    """One rank of a critic that has ranks of its own; `config` is that of `Config.as_critic`."""

    def _build(self, config: Any) -> None:
        from slimx.trainer.critic import CriticTrainer

        self._critic = CriticTrainer(config, self._parallel)

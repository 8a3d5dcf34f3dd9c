"""One trainer rank: its process groups, its GPU, and its roles, the objects whose operations the driver calls.

worker.call("model.train_updates", ...) --> TrainerRank.perform --> PolicyTrainer.train_updates
                                                                    (phase "train", with everything on the device)

model     PolicyTrainer, or the trainer of another kind of learner
weights   WeightExport, which exports the model's weights to engines and files
rank      operations of TrainerRank itself
others    entry points of `slimx.roles`
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import nullcontext
from typing import Protocol

import torch

from slimx import entry_points
from slimx.algorithms.learner import learner_of
from slimx.config.schema import Config
from slimx.data.batch import micro_batches
from slimx.data.packing import fetch_rows
from slimx.errors import SlimxError
from slimx.layout.ranks import sizes_of
from slimx.models.families import configured_model
from slimx.trainer.device.gpu import MemoryGuard, check_health, gpu_of, set_affinity
from slimx.trainer.device.memory import PhasePeaks, meter_of
from slimx.trainer.operation import Operation, operation
from slimx.trainer.parallel import ParallelState
from slimx.trainer.trained_model import TrainedModel
from slimx.trainer.trainer import PolicyTrainer
from slimx.trainer.weight_export import WeightExport


class Role(Protocol):
    """Part of a trainer rank, such as the trainer of a policy, with operations that the driver calls."""

    def reload(self, *, training: bool = True) -> None:
        """Moves the role's weights to the device and, if `training` is true, the gradients and optimizer state as
        well."""

    def offload(self, *, weights: bool = True) -> None:
        """Releases the role's device memory, including that of its weights only if `weights` is true."""


class TrainerRank:
    """Roles of one rank, and the process groups and the device that they share. Every operation is called on all ranks
    at the same time."""

    def __init__(self, config: Config, number: int, device: str):
        """Sets up the device. On CUDA, raises SlimxError for a defective GPU, restricts the process to the CPUs near
        the GPU, and creates the MemoryGuard that checks the GPU's free memory. `number`: global rank."""
        torch.set_num_threads(config.trainer.threads)
        self.config = config
        self.number = number
        self.device = torch.device(device)
        self.roles: dict[str, Role] = {}
        self._parallel: ParallelState | None = None
        self.guard: MemoryGuard | None = None
        self.hardware: dict[str, str | int] = {}
        """UUID of the GPU and number of usable CPUs, on CUDA; {} on the CPU."""
        if self.device.type == "cuda":
            self._inspect_gpu()
        self._memory = PhasePeaks(meter_of(self.device), "generate" if config.served.policy else "wait")

    @property
    def parallel(self) -> ParallelState:
        """Parallel coordinates and process groups of this rank; available after `meet`."""
        assert self._parallel is not None
        return self._parallel

    def _inspect_gpu(self) -> None:
        gpu = gpu_of(self.device)
        warnings = check_health(gpu)
        cpus = set_affinity(gpu) if self.config.cluster.cpu_affinity == "auto" else os.sched_getaffinity(0)
        for line in (*warnings, f"rank {self.number}: {gpu.uuid}, on {len(cpus)} CPUs"):
            print(f"slimx: {line}", flush=True)
        margin = self.config.trainer.memory_margin_mib * 2**20
        self.guard = MemoryGuard(gpu, margin, free_caches=torch.cuda.empty_cache)
        self.hardware = {"gpu": gpu.uuid, "cpus": len(cpus)}

    def meet(self, init_method: str) -> None:
        """Creates the process groups together with all other ranks. `init_method`: address at which the ranks meet, in
        the format of torch.distributed."""
        self._parallel = ParallelState(
            sizes_of(self.config.trainer),
            rank=self.number,
            init_method=init_method,
            device=self.device,
            deadline_s=self.config.trainer.deadline,
            seed=self.config.run.seed,
        )

    def build(self, roles: Collection[str]) -> None:
        """Builds the roles named in `roles`; "model" includes the role "weights"."""
        if "model" in roles:
            learner = learner_of(self.config.algorithm)
            trainer = PolicyTrainer if learner is None else learner.trainer()
            model = trainer(self.config, configured_model(self.config), self.parallel)
            # Added first, so that `offload` releases its buffers before the weights.
            self.roles["weights"] = WeightExport(model, self._memory)
            self.roles["model"] = model
        for name in roles:
            self._role(name)

    def perform(self, name: str, /, *arguments: object, **named: object) -> object:
        """Runs the operation `name` ("role.method") and returns its result. First loads the columns of the rows in
        `arguments`, reloads the parts of the model that the operation needs on the device (see `Operation`), and before
        training checks the free GPU memory."""
        role_name, _, method = name.partition(".")
        role = None if role_name == "rank" else self._role(role_name)
        function = getattr(self if role is None else role, method)
        conditions: Operation = function.operation
        batches = list(micro_batches(arguments))
        fetch_rows(batches)
        if isinstance(role, PolicyTrainer):
            role.routing.receive(batches)
        with nullcontext() if conditions.phase is None else self._memory.phase(conditions.phase):
            if conditions.needs is not None and role is not None:
                role.reload(training=conditions.needs == "training")
            if self.guard is not None and conditions.phase == "train" and isinstance(role, TrainedModel):
                self.guard.check(role.device_bytes())
            return function(*arguments, **named)

    def _role(self, name: str) -> Role:
        """Returns the role `name`. A role with which this rank was not built is created from the entry point of that
        name in the group `slimx.roles`."""
        if name not in self.roles:
            if name not in entry_points.find("slimx.roles"):
                raise SlimxError(
                    f"trainer rank {self.number} has no role {name}, only {', '.join(self.roles)}; install a package "
                    "that provides this role as an entry point of slimx.roles",
                )
            self.roles[name] = entry_points.load("slimx.roles", name)(self)
        return self.roles[name]

    def check_saves(self) -> None:
        """Raises the error of a background save that could not be reported in the checkpoint directory."""
        for role in self.roles.values():
            if isinstance(role, TrainedModel) and role.saver.failure is not None:
                raise role.saver.failure

    @operation()
    def offload(self, *, weights: bool = True) -> None:
        """Releases the device memory of all roles, so that colocated engines can use it. The memory of the weights is
        released only if `weights` is true."""
        for role in self.roles.values():
            role.offload(weights=weights)

    @operation()
    def reload(self) -> None:
        """Moves back to the device everything that `offload` has released."""
        for role in self.roles.values():
            role.reload()

    @operation()
    def memory(self) -> dict[str, float]:
        """Returns {`memory/PHASE_peak_mib`: this rank's peak memory in MiB} for each phase since the last call."""
        return self._memory.take()

    def leave(self) -> None:
        """Leaves the process groups of this rank."""
        if self._parallel is not None:
            self._parallel.destroy()

"""One trainer rank: its process groups, its GPU, and the roles that it has in training.

worker.call("model.train_updates", ...) --> TrainerRank.perform --> PolicyTrainer.train_updates
                                                                    (phase "train", all of it on the device)

model     PolicyTrainer, or that of a learner
weights   WeightExport: the model's, to engines and files
rank      the methods below
others    entry points of `slimx.roles`
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from slimx import entry_points
from slimx.algorithms.learner import learner_of
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.layout.ranks import sizes_of
from slimx.models.families import configured_model
from slimx.trainer.device.gpu import MemoryGuard, check_health, gpu_of, set_affinity
from slimx.trainer.device.memory import PhaseMemory, meter_of
from slimx.trainer.operation import Operation, operation
from slimx.trainer.parallel import ParallelState
from slimx.trainer.trained import TrainedModel
from slimx.trainer.trainer import PolicyTrainer
from slimx.trainer.weight_export import WeightExport


class Role(Protocol):
    """A part of a rank that has operations."""

    def reload(self, *, training: bool = True) -> None:
        """Bring the model to the device: its weights, and with `training` gradients and optimizer state."""

    def offload(self, *, weights: bool = True) -> None:
        """Give the device's memory back, that of the weights only with `weights`."""


class TrainerRank:
    """Roles of one rank. Every operation is called on all ranks together."""

    def __init__(self, config: Config, number: int, device: str):
        """On CUDA: refuse a broken GPU, run on the CPUs near it, and guard its memory."""
        torch.set_num_threads(config.trainer.threads)
        self.config, self.number, self.device = config, number, torch.device(device)
        self.roles: dict[str, Role] = {}
        self.parallel: ParallelState | None = None
        self.guard: MemoryGuard | None = None
        self.place: dict[str, Any] = {}
        """UUID of the GPU and number of the CPUs, on CUDA."""
        if self.device.type == "cuda":
            self._look_at_gpu()
        self._memory = PhaseMemory(meter_of(self.device), "generate" if config.rollout.policy_engines else "wait")

    def _look_at_gpu(self) -> None:
        gpu = gpu_of(self.device)
        warnings = check_health(gpu)
        cpus = set_affinity(gpu) if self.config.cluster.cpu_affinity == "auto" else os.sched_getaffinity(0)
        for line in (*warnings, f"rank {self.number}: {gpu.uuid}, on {len(cpus)} CPUs"):
            print(f"slimx: {line}", flush=True)
        margin = self.config.trainer.memory_margin_mib * 2**20
        self.guard = MemoryGuard(gpu, margin, free_caches=torch.cuda.empty_cache)
        self.place = {"gpu": gpu.uuid, "cpus": len(cpus)}

    def meet(self, init_method: str) -> None:
        """Join the other ranks."""
        self.parallel = ParallelState(
            sizes_of(self.config.trainer),
            rank=self.number,
            init_method=init_method,
            device=self.device,
            deadline_s=self.config.trainer.deadline,
            seed=self.config.run.seed,
        )

    def build(self, roles: Collection[str]) -> None:
        """Build `roles`; with the "model" come its "weights"."""
        if "model" in roles:
            learner = learner_of(self.config.algorithm)
            trainer = PolicyTrainer if learner is None else learner.trainer()
            model = trainer(self.config, configured_model(self.config), self.parallel)
            # First: its buffers go before the weights that they were filled from.
            self.roles["weights"] = WeightExport(model, self._memory)
            self.roles["model"] = model
        for name in roles:
            self._role(name)

    def perform(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Do the operation `name`, "role.method", under its conditions."""
        role, _, method = name.partition(".")
        target = self if role == "rank" else self._role(role)
        function = getattr(target, method)
        conditions: Operation = function.operation
        with nullcontext() if conditions.phase is None else self._memory.phase(conditions.phase):
            if conditions.needs is not None:
                target.reload(training=conditions.needs == "training")
            if self.guard is not None and conditions.phase == "train":
                self.guard.check(target.holds())
            return function(*arguments, **named)

    def _role(self, name: str) -> Role:
        """The role `name`; one that this rank was not built with is an entry point of `slimx.roles`."""
        if name not in self.roles:
            if name not in entry_points.find("slimx.roles"):
                raise SlimxError(
                    f"rank {self.number} has no role {name}; it has {', '.join(self.roles)}",
                )
            self.roles[name] = entry_points.load("slimx.roles", name)(self)
        return self.roles[name]

    def check_saves(self) -> None:
        """Raise the error of a save in the background that could not be reported in the checkpoint's directory."""
        for role in self.roles.values():
            if isinstance(role, TrainedModel) and role.saver.failure is not None:
                raise role.saver.failure

    @operation()
    def offload(self, *, weights: bool = True) -> None:
        """Give the device's memory back to engines on it; `weights`: those of the model, too."""
        for role in self.roles.values():
            role.offload(weights=weights)

    @operation()
    def reload(self) -> None:
        """Take back all that `offload` gave."""
        for role in self.roles.values():
            role.reload()

    @operation()
    def memory(self) -> dict[str, float]:
        """Return `memory/PHASE_peak_mib` of this rank since the last call, in MiB."""
        return self._memory.take()

    def leave(self) -> None:
        """Leave the process groups."""
        if self.parallel is not None:
            self.parallel.destroy()

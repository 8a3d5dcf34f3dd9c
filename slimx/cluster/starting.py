"""Start of trainers and engines: its deadline (`cluster.start_deadline`, or derived from the size of the weights), and
the lines about it in the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from slimx import entry_points
from slimx.config.schema import Config
from slimx.errors import counted, duration

CPU_S = 300.0
"""Seconds within which trainers and engines must have started on CPUs."""
READ_RATE = 1e9
"""Assumed rate at which a node reads weights from shared storage, in bytes/s. Only one process per node reads from the
storage; the others find the files in the page cache."""
COMPILATION_S = 600.0
"""Assumed seconds for compiling kernels, except those of DeepGEMM, and capturing CUDA graphs during a first start on
GPUs."""


def start_deadline(config: Config, device: str) -> float:
    """Returns the time limit, in seconds, for the start of trainers and engines. `device`: "cpu" or "cuda"."""
    deadline = config.cluster.start_deadline
    return start_seconds(device, weight_bytes(config)) if deadline is None else deadline


def start_seconds(device: str, nbytes: int) -> float:
    """Returns the maximum number of seconds that a first start may take on `device`, "cpu" or "cuda". `nbytes`: size of
    the weights that a node reads."""
    return CPU_S if device == "cpu" else nbytes / READ_RATE + COMPILATION_S


def weight_bytes(config: Config) -> int:
    """Returns the size in bytes of all weights that a node with trainers and engines reads at the start. Files that are
    not on this machine are not counted."""
    directories = {config.initial_weights}
    for group in config.served.groups:
        if group.started:
            directories.add(group.model or config.model.path)
    if config.critic is not None and config.critic.load is not None:
        directories.add(config.critic.load)
    patterns = ("*.safetensors", "*/*.distcp")  # Hugging Face directory, Megatron-LM checkpoint
    total = 0
    for directory in directories:
        for pattern in patterns:
            for file in Path(directory).glob(pattern):
                total += file.stat().st_size
    return total


def trained_ranks(config: Config) -> int:
    """Returns the number of ranks that train one policy, including those of its critic if the critic has separate
    ranks."""
    ranks = config.trainer.world_size
    if config.critic is not None and config.critic.placement == "own":
        ranks += config.as_critic().trainer.world_size
    return ranks


def worker_count(config: Config) -> int:
    """Returns the number of rollout workers (`rollout.workers`); 0: the driver generates the rollouts."""
    workers = config.rollout.workers
    if not config.served.policy:
        return 0
    if workers == "auto":
        workers = 1
        if config.cluster.ray_address:
            workers = entry_points.load("slimx.rollout_workers", "count")(config)
    return 0 if workers == 1 else workers


@dataclass(frozen=True, slots=True)
class Starting:
    """Processes of a run that are being started, described for the log."""

    parts: str
    """Description of the processes, such as "2 trainers, 1 engine"."""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, config: Config, *, trainers: bool = True) -> Starting:
        """Returns the processes that a run of `config` starts. `trainers`: True to include trainers."""
        ranks = 0
        engines = 0
        for policy in config.by_policy.values():
            engines += sum(group.started for group in policy.served.groups)
            if trainers:
                ranks += trained_ranks(policy)
        parts = []
        workers = worker_count(config)
        for count, name in ((ranks, "trainer"), (engines, "engine"), (workers, "rollout worker")):
            if count:
                parts.append(counted(count, name))
        return cls(", ".join(parts) or "Ray")

    @property
    def line(self) -> str:
        return f"starting {self.parts}"

    @property
    def ready(self) -> str:
        return f"{self.parts} ready after {duration(time.monotonic() - self.since)}"

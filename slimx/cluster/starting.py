"""The start of trainers and engines: the seconds that they have, `cluster.start_deadline` or what reading the weights
takes; how many there are; and the lines about the start and its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from slimx.config.schema import Config

CPU_S = 300.0
READ_RATE = 1e9
"""Bytes per second at which a node reads weights from shared storage; its other processes read them from its memory.
Assumed."""
COMPILATION_S = 600.0
"""Seconds on GPUs for what is compiled and captured at a first start, without kernels of DeepGEMM. Assumed."""


def start_deadline(config: Config, device: str) -> float:
    """Seconds until trainers and engines on `device`, "cpu" or "cuda", must be up."""
    deadline = config.cluster.start_deadline
    return start_seconds(device, weight_bytes(config)) if deadline is None else deadline


def start_seconds(device: str, nbytes: int) -> float:
    """Seconds that a first start with `nbytes` of weights may take."""
    return CPU_S if device == "cpu" else nbytes / READ_RATE + COMPILATION_S


def weight_bytes(config: Config) -> int:
    """Bytes of all weights that a node with trainers and engines reads when they start; files that are not on this
    machine do not count."""
    directories = {config.initial_weights}
    directories |= {group.model or config.model.path for group in config.rollout.engines if group.started}
    if config.critic is not None and config.critic.load is not None:
        directories.add(config.critic.load)
    patterns = ("*.safetensors", "*/*.distcp")  # Hugging Face's directory, Megatron-LM's
    files = (file for name in directories for pattern in patterns for file in Path(name).glob(pattern))
    return sum(file.stat().st_size for file in files)


def trained_ranks(config: Config) -> int:
    """Processes that train one policy, and a critic that does not share them."""
    critic = config.as_critic().trainer.world_size if config.critic and config.critic.placement == "own" else 0
    return config.trainer.world_size + critic


@dataclass(frozen=True, slots=True)
class Starting:
    """Parts of a run that are being started, together with Ray."""

    parts: str
    """Such as "2 trainers, 1 engine"."""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, config: Config, *, trainers: bool = True) -> Starting:
        """Parts of `config`; `trainers`: whether the command has any."""
        ranks = sum(trained_ranks(own) for own in config.by_policy.values()) if trainers else 0
        engines = sum(group.started for own in config.by_policy.values() for group in own.rollout.served)
        counted = [(ranks, "trainer"), (engines, "engine")]
        return cls(", ".join(f"{count} {name}{'s' * (count > 1)}" for count, name in counted if count) or "Ray")

    @property
    def line(self) -> str:
        return f"starting {self.parts}"

    @property
    def ready(self) -> str:
        return f"{self.parts} ready after {time.monotonic() - self.since:.0f} s"

"""Seconds that trainers and engines have to start: `cluster.start_deadline`, or what reading the weights takes."""

from __future__ import annotations

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

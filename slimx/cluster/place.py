"""Says where a Ray actor runs: its machine and its GPUs. Imported by actors of every kind, so it imports Ray alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.runtime.ports import is_own, machine

DEVICES = "CUDA_VISIBLE_DEVICES"
"""CUDA's own variable: the GPUs of a process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The machine and the GPUs of one machine's share of a server."""

    node: str | None = None
    """Ray's id of the machine; None: Ray chooses one that has room."""
    gpus: tuple[str, ...] | None = None
    """GPUs that it shares with trainer ranks; None: Ray gives it its own."""
    owned: int = 0
    """GPUs of its own."""

    def options(self, cpus: float) -> dict[str, Any]:
        """Options of the share's Ray actor."""
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": self.owned}
        if self.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return options


def place_of(actor: Any) -> Placement:
    """The placement of the Ray actor that runs this: its machine, and the GPUs that it sees."""
    gpus = os.environ.get(DEVICES)
    return Placement(ray.get_runtime_context().get_node_id(), tuple(gpus.split(",")) if gpus is not None else None)


def identity_of(actor: Any) -> dict[str, Any]:
    """The process of the Ray actor that runs this, its machine, and Ray's id of that."""
    return {"pid": os.getpid(), "machine": machine(), "node": ray.get_runtime_context().get_node_id()}


def place_among(actor: Any, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Ray's id of this machine, and which of `hosts` are addresses of it."""
    return place_of(actor).node or "", [host for host in hosts if is_own(host)]

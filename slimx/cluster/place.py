"""Placement of Ray actors: machine and GPUs. Actors of every kind import it, so it imports nothing heavy but Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.json_types import Json
from slimx.runtime.ports import is_local, machine

type Actor = Any
"""Handle of a Ray actor, whose methods Ray creates at run time."""
DEVICES = "CUDA_VISIBLE_DEVICES"
"""CUDA's variable with the GPUs of a process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Machine and GPUs of the part of a server on one machine."""

    node: str | None = None
    """Ray's id of the machine; None: Ray chooses one with free resources."""
    gpus: tuple[str, ...] | None = None
    """GPUs shared with trainer ranks; None: Ray assigns dedicated ones."""
    owned: int = 0
    """Number of dedicated GPUs."""

    def options(self, cpus: float) -> Json:
        """Returns options of the Ray actor."""
        options: Json = {"num_cpus": cpus, "num_gpus": self.owned}
        if self.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return options


def place_of(actor: Actor) -> Placement:
    """Returns the placement of the Ray actor that runs this: its machine and its visible GPUs."""
    gpus = os.environ.get(DEVICES)
    node = ray.get_runtime_context().get_node_id()
    return Placement(node, tuple(gpus.split(",")) if gpus is not None else None)


def identity_of(actor: Actor) -> Json:
    """Returns process id, machine and Ray's node id of the Ray actor that runs this."""
    return {"pid": os.getpid(), "machine": machine(), "node": ray.get_runtime_context().get_node_id()}


def place_among(actor: Actor, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Returns Ray's id of this machine, and those of `hosts` that are addresses of it."""
    return place_of(actor).node or "", [host for host in hosts if is_local(host)]

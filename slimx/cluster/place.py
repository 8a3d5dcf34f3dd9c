"""Placement of Ray actors: their machine and GPUs. Actors of every kind import this module, so it imports nothing slow
except Ray."""

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
"""Handle of a Ray actor. Its methods are created by Ray at run time, so they have no static types."""
DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable that lists the GPUs visible to a CUDA process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a server's ranks on one machine: the machine, and the GPUs that they use."""

    node: str | None = None
    """Ray's node id of the machine; None: Ray chooses a machine with free resources."""
    gpus: tuple[str, ...] | None = None
    """GPUs shared with trainer ranks, identified as in CUDA_VISIBLE_DEVICES; None: Ray assigns dedicated GPUs."""
    owned: int = 0
    """Number of dedicated GPUs to request from Ray."""

    def options(self, cpus: float) -> Json:
        """Returns the Ray options for an actor with this placement. `cpus`: number of CPUs that the actor reserves."""
        options: Json = {"num_cpus": cpus, "num_gpus": self.owned}
        if self.gpus is not None:  # without GPUs of its own, the actor would see all of the machine's
            options["runtime_env"] = {"env_vars": {DEVICES: ",".join(self.gpus)}}
        if self.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return options


def place_of(actor: Actor) -> Placement:
    """Returns the placement of the Ray actor that runs this function: its machine and its visible GPUs. `actor`: the
    actor itself."""
    gpus = os.environ.get(DEVICES)
    node = ray.get_runtime_context().get_node_id()
    return Placement(node, tuple(gpus.split(",")) if gpus is not None else None)


def identity_of(actor: Actor) -> Json:
    """Returns the process id, machine identifier and Ray node id of the Ray actor that runs this function. `actor`: the
    actor itself."""
    return {"pid": os.getpid(), "machine": machine(), "node": ray.get_runtime_context().get_node_id()}


def place_among(actor: Actor, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the Ray node id of this machine, and the entries of `hosts`, names or addresses, that refer to this
    machine. `actor`: the Ray actor that runs this function."""
    return place_of(actor).node or "", [host for host in hosts if is_local(host)]

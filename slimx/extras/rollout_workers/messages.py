"""Messages between the driver and a rollout worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slimx.config.sections.eval import Eval
from slimx.data.records import Group, Prompt
from slimx.rollout.client.generation import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of the run that every worker follows."""

    number: int = field(compare=False)
    """Increasing number, because Ray may execute calls in another order."""
    open: bool
    """True if training rollouts may send requests to engines."""
    begun: dict[str, int]
    """Newest version of each policy's weights that engines may have."""
    outages: frozenset[str]
    """Policies without an engine that serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of a worker."""

    endpoints: dict[str, Endpoint]
    """Engines of each policy."""
    frozen: dict[str, Any]
    """Clients of the engines of frozen models, by group name."""
    context: int
    """Maximum length of a trajectory in tokens."""
    concurrency: int
    """Maximum number of the worker's requests in flight."""
    max_rollouts: int
    """Maximum number of the worker's rollouts in flight."""
    journal: str
    """File for the progress of the worker's groups."""
    earlier: tuple[str, ...] = ()
    """Files of lost processes of the worker, whose jobs it continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One group that a worker generates: the arguments of `GroupMaker.make`."""

    serial: int
    """Number of the job, unique in the run's process."""
    prompt: Prompt
    group_id: str
    number: int
    evaluation: Eval | None
    versions: dict[str, int]
    """Newest published version of each policy's weights."""
    saved: bytes | None = None
    """Encoded progress (list of `SavedRollout`) of the group from a checkpoint; None if there is none."""
    again: bool = False
    """True if a process of the worker was lost, whose journal may contain the group's progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Outcome of a job."""

    serial: int
    group: Group | None = None
    """The group; its columns are in the object that accompanies the report."""
    reason: str | None = None
    """Drop reason; None if the group was not dropped."""
    detail: str | None = None
    error: BaseException | None = None
    """Exception that ends the run, because it is not a failure of a rollout; None if there is a group."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A request that was lost with its engine. The worker retries it when the driver has looked for lost engines."""

    policy: str
    number: int


@dataclass(slots=True)
class Report:
    """Events of a worker since its previous report."""

    finished: list[Finished] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    complete: dict[int, int] = field(default_factory=dict)
    """Number of complete rollouts of each unfinished job in which it has changed, by serial number."""
    requests: int = 0
    """Number of training requests in flight."""
    retried: dict[str, int] = field(default_factory=dict)
    """Number of requests of each policy that were retried so far because an engine was lost."""


Groups = list[np.ndarray]
"""Encoded groups (`slimx.data.saved.codec`) of the jobs that a report finishes, uint8 [bytes] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of a worker's process."""

    blocked_s: float
    """Seconds for which the event loop has not run."""
    group: str | None
    """Id of the group whose hook runs while the event loop is blocked; None if no hook runs."""
    location: str
    """Function, file and line that the event loop's thread executes."""
    memory: int
    """Resident memory in bytes."""

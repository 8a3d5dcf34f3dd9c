"""Trajectories whose columns are stored elsewhere, such as in Ray's object store on the machine that generated them.

The driver has only what it needs to select, weight and measure the trajectories of a step. The columns are loaded by
the ranks that train on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

from slimx.data.lazy import Lazy, set_fields
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError

COUNTS = ("length", "sampled_tokens", "trained_tokens", "turn_count", "oldest_version", "mixed")
"""Properties of a trajectory that are computed from its columns, and that a `StoredTrajectory` has without them."""
STORED = {
    *("token_ids", "loss_mask", "logprobs", "spans", "turns", "sampling", "support", "routed_experts", "images"),
    *("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
}
"""Fields of a trajectory that a `StoredTrajectory` loads."""
KEPT = STORED | {"id", "columns", "place", "length"}
"""Fields of a `StoredTrajectory` that a trainer rank needs."""

_counts = attrgetter(*COUNTS)
_COUNTED = {"token_ids": COUNTS[:1], "loss_mask": ("trained_tokens",), "spans": ("sampled_tokens", *COUNTS[3:])}


class Columns(Protocol):
    """Handle of a stored group. A copy by pickle is a handle of the same group."""

    def load(self) -> Group:
        """Returns the group. Raises LookupError if it is lost."""

    def fetch(self, handles: Sequence[Columns]) -> None:
        """Loads the groups of all `handles`, which have the same class, at once, so that `load` returns them without
        waiting. Ignores lost groups."""


class StoredTrajectory(Lazy, Trajectory):
    """Trajectory whose columns are loaded when one of them is first read. Raises SlimxError then if they are lost."""

    __slots__ = ("columns", "computed", "names", "place", *COUNTS)
    complete = Trajectory
    columns: Columns
    place: int
    """Index of the trajectory in the group that `columns` loads."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        for count in _COUNTED.get(name, ()):
            super().__setattr__(count, vars(Trajectory)[count].fget(self))

    def compute(self) -> Trajectory:
        try:
            return self.columns.load().trajectories[self.place]
        except LookupError as error:
            raise SlimxError(
                f"the columns of trajectory {self.id} are lost, probably with the machine that stored them ({error}); "
                "run the same command again to continue from the newest checkpoint",
                code="data.lost",
                about=self.id,
            ) from error

    def bare(self) -> Trajectory:
        values = set_fields(self)
        return self.holding({name: values[name] for name in values if name in KEPT})


def summarize(group: Group, store: Callable[[Group], Columns]) -> Group:
    """Returns a copy of `group` whose trajectories are stored with `store`, a function that stores a group and returns
    its handle. Trajectories with expert routes, which are most of the bytes, are stored one by one, so that a rank
    does not load the routes of others."""
    parts = [group]
    if any(trajectory.routed_experts is not None for trajectory in group.trajectories):
        parts = [replace(group, trajectories=[trajectory]) for trajectory in group.trajectories]
    stored: list[Trajectory] = []
    for part in parts:
        columns = store(part)
        for place, trajectory in enumerate(part.trajectories):
            values = dict(zip(COUNTS, _counts(trajectory), strict=True))
            for name, value in set_fields(trajectory).items():
                if name not in STORED or value is None or len(value) == 0:
                    values[name] = value
            stored.append(StoredTrajectory.holding(values | {"columns": columns, "place": place}))
    return replace(group, trajectories=stored)


def fetch(trajectories: Iterable[Trajectory]) -> None:
    """Loads the columns of all those of `trajectories` that are stored, at once."""
    handles = {}
    for trajectory in trajectories:
        if isinstance(trajectory, StoredTrajectory):
            handles[id(trajectory.columns)] = trajectory.columns
    for handle in list(handles.values())[:1]:
        handle.fetch(list(handles.values()))

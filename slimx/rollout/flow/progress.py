"""The finished part of a group that is not complete, so that nothing sampled is sampled twice.

Of a rollout that is complete, its trajectories are kept, with their rewards. Of one that is not, every completion that
its hook got from the engines, the last one perhaps cut off in the middle. The hook is run again in a resumed run, from
its beginning: where it asks for what was sampled already (the same tokens to continue, the same seed, the same sampling
parameters) it gets that, and from there on the engines. No hook needs to know; one that asks for something else the
second time gets new tokens for it, as it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from slimx.data.records import Trajectory
from slimx.digest import fingerprint
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The answer to one request of a hook so far."""

    key: str
    """Key of the request: `key_of`."""
    token_ids: np.ndarray
    """int32: what was to be continued."""
    completion: Completion
    """With finish_reason "abort" if there is more to come."""


@dataclass(kw_only=True, slots=True)
class SavedRollout:
    """One rollout of a group that is not complete, as a checkpoint keeps it."""

    index: int
    trajectories: list[Trajectory] | None = None
    """None: it is not complete."""
    completions: list[Recorded] = field(default_factory=list)


class Journal:
    """The completions of one rollout, by what was asked for."""

    def __init__(self, recorded: Sequence[Recorded] = ()) -> None:
        self._recorded = {entry.key: entry for entry in recorded}
        self._replayed = dict(self._recorded)

    def replay(self, request: GenerationRequest) -> Completion | None:
        """The answer of an earlier run to `request`. Within one run nothing is replayed: a request is made once."""
        entry = self._replayed.get(key_of(request))
        return entry.completion if entry is not None else None

    def record(self, request: GenerationRequest, completion: Completion) -> None:
        """Keep what was sampled for `request`."""
        key, token_ids = key_of(request), np.array(request.token_ids, np.int32)
        for other, entry in self._recorded.items():
            whole = len(entry.token_ids) + len(entry.completion.token_ids)
            if other != key and entry.completion.routed_experts is not None and _begins(token_ids, entry, whole):
                # The later completion brings the routes of these positions too, and they are large.
                self._recorded[other] = replace(entry, completion=replace(entry.completion, routed_experts=None))
        self._recorded[key] = Recorded(key=key, token_ids=token_ids, completion=completion)

    def entries(self) -> list[Recorded]:
        return list(self._recorded.values())


@dataclass(slots=True)
class GroupProgress:
    """Progress of one group, by the number of the rollout."""

    done: dict[int, list[Trajectory]] = field(default_factory=dict)
    journals: dict[int, Journal] = field(default_factory=dict)

    def journal(self, index: int) -> Journal:
        return self.journals.setdefault(index, Journal())

    def finish(self, index: int, trajectories: list[Trajectory]) -> None:
        """Rollout `index` is complete, rewards and all."""
        self.done[index] = trajectories
        self.journals.pop(index, None)

    def save(self) -> list[SavedRollout]:
        done = [SavedRollout(index=index, trajectories=kept) for index, kept in self.done.items()]
        begun = [
            SavedRollout(index=index, completions=entries)
            for index, journal in self.journals.items()
            if (entries := journal.entries())
        ]
        return sorted(done + begun, key=lambda rollout: rollout.index)

    @classmethod
    def restore(cls, saved: Sequence[SavedRollout]) -> GroupProgress:
        out = cls()
        for rollout in saved:
            if rollout.trajectories is not None:
                out.done[rollout.index] = rollout.trajectories
            else:
                out.journals[rollout.index] = Journal(rollout.completions)
        return out

    @property
    def begun(self) -> bool:
        """True once anything was sampled."""
        return bool(self.done) or any(journal.entries() for journal in self.journals.values())


def key_of(request: GenerationRequest) -> str:
    """The same for the same request, in any process."""
    asked = msgspec.json.encode([request.sampling, request.seed], order="sorted")
    return fingerprint(np.array(request.token_ids, np.int32).tobytes() + asked)


def _begins(token_ids: np.ndarray, entry: Recorded, whole: int) -> bool:
    """Returns True if `token_ids` begins with all that `entry` had and brought."""
    had = len(entry.token_ids)
    return (
        len(token_ids) >= whole
        and np.array_equal(token_ids[:had], entry.token_ids)
        and np.array_equal(token_ids[had:whole], entry.completion.token_ids)
    )

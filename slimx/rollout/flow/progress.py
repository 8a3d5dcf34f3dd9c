"""The finished part of a group that is not complete, so that nothing sampled is sampled twice.

Of a rollout that is complete, its trajectories are kept, with their rewards. Of one that is not, every completion that
its hook got from the engines, the last one perhaps cut off in the middle. The hook is run again in a resumed run, from
its beginning: where it asks for what was sampled already (the same tokens to continue, the same seed, the same sampling
parameters) it gets that, and from there on the engines. No hook needs to know; one that asks for something else the
second time gets new tokens for it, as it must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    routes_of: str | None = None
    """Key of the later answer whose routed experts begin with those of this one, which then lacks them."""


@dataclass(kw_only=True, slots=True)
class SavedRollout:
    """One rollout of a group that is not complete, as a checkpoint keeps it."""

    index: int
    trajectories: list[Trajectory] | None = None
    """None: it is not complete."""
    completions: list[Recorded] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Kept:
    """A `Recorded` of which only what is new is held: a turn repeats all tokens of those before it."""

    before: _Kept | None
    """The one that the request went on from."""
    new: np.ndarray
    """int32: what was to be continued, without all that `before` had and brought."""
    completion: Completion
    routes_of: str | None = None
    """As in `Recorded`."""

    @property
    def asked(self) -> np.ndarray:
        """int32: what was to be continued."""
        return self.new if self.before is None else np.concatenate([self.before.whole, self.new])

    @property
    def whole(self) -> np.ndarray:
        """int32: what was to be continued, and what came."""
        parts: list[np.ndarray] = []
        kept: _Kept | None = self
        while kept is not None:
            parts += [kept.completion.token_ids, kept.new]
            kept = kept.before
        return np.concatenate(parts[::-1])


class Journal:
    """The completions of one rollout, by what was asked for."""

    def __init__(self, recorded: Sequence[Recorded] = ()) -> None:
        self._kept: dict[str, _Kept] = {}
        for entry in recorded:
            self._keep(entry.key, entry.token_ids, entry.completion, entry.routes_of)
        by_key = {entry.key: entry for entry in recorded}
        self._replayed = {entry.key: _with_routes(entry, by_key) for entry in recorded}

    def replay(self, request: GenerationRequest) -> Completion | None:
        """The answer of an earlier run to `request`. Within one run nothing is replayed: a request is made once."""
        return self._replayed.get(key_of(request)) if self._replayed else None

    def record(self, request: GenerationRequest, completion: Completion) -> None:
        """Keep what was sampled for `request`."""
        self._keep(key_of(request), np.array(request.token_ids, np.int32), completion)

    def _keep(self, key: str, token_ids: np.ndarray, completion: Completion, routes_of: str | None = None) -> None:
        # The newest first: a request goes on from the one before it, mostly.
        others = [kept for other, kept in reversed(self._kept.items()) if other != key]
        before = next((kept for kept in others if _begins(token_ids, kept)), None)
        new = token_ids
        if before is not None:
            new = token_ids[len(before.whole) :].copy()  # the slice alone would hold all of it
            # Routes are large, and a turn brings those of all positions before it, too; not always the same, for it may
            # be of another policy or version. What is not complete yet gives way to another of the same key.
            if completion.finish_reason != "abort" and _routes_begin(completion, before.completion):
                _forget_routes(before)
                before.routes_of = key
        if (older := self._kept.get(key)) is not None:  # which others may go on from as it is
            _forget_routes(older)
        self._kept[key] = _Kept(before, new, completion, routes_of)

    @property
    def begun(self) -> bool:
        """True once anything was recorded."""
        return bool(self._kept)

    def entries(self) -> list[Recorded]:
        return [
            Recorded(key=key, token_ids=each.asked, completion=each.completion, routes_of=each.routes_of)
            for key, each in self._kept.items()
        ]


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
        return bool(self.done) or any(journal.begun for journal in self.journals.values())


def key_of(request: GenerationRequest) -> str:
    """The same for the same request, in any process."""
    asked = msgspec.json.encode([request.sampling, request.seed], order="sorted")
    return fingerprint(np.array(request.token_ids, np.int32).tobytes() + asked)


def _begins(token_ids: np.ndarray, kept: _Kept) -> bool:
    """Returns True if `token_ids` begins with all that `kept` had and brought."""
    whole = kept.whole
    return len(token_ids) >= len(whole) and np.array_equal(token_ids[: len(whole)], whole)


def _routes_begin(later: Completion, earlier: Completion) -> bool:
    """Returns True if the routes of `later` begin with those of `earlier`."""
    routes, begin = later.routed_experts, earlier.routed_experts
    return routes is not None and begin is not None and np.array_equal(routes[: len(begin)], begin)


def _with_routes(entry: Recorded, by_key: Mapping[str, Recorded]) -> Completion:
    """The completion of `entry` with its routes, wherever among `by_key` they are."""
    holder = entry
    while holder.routes_of is not None:
        holder = by_key[holder.routes_of]
    if holder is entry:
        return entry.completion
    count = len(entry.token_ids) + len(entry.completion.token_ids) - 1
    return replace(entry.completion, routed_experts=holder.completion.routed_experts[:count])


def _forget_routes(kept: _Kept) -> None:
    kept.completion = replace(kept.completion, routed_experts=None)

"""Saved progress of an incomplete group, from which a resumed run continues without sampling any token again.

For a complete rollout, the progress contains its trajectories with rewards. For an incomplete one, it contains every
completion that the generate hook received from the engines, the last one possibly partial. A resumed run calls the hook
again from the start: a request that was answered before (same tokens, seed and sampling parameters) gets the recorded
completion, and later requests go to the engines. Hooks need no code for this; a hook that sends different requests the
second time gets new tokens for these requests.
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
    """The response so far to one request of a hook, as stored in a checkpoint."""

    key: str
    """Hash of the request's tokens, sampling parameters and seed (`key_of`), by which a resumed run finds the
    response."""
    token_ids: np.ndarray
    """Token ids of the request's prompt, int32."""
    completion: Completion
    """Tokens sampled so far; finish_reason is "abort" if the completion is incomplete."""
    routes_of: str | None = None
    """Key of a later response whose routed experts start with those of this response, which are therefore not stored
    here; None if they are stored here."""


@dataclass(kw_only=True, slots=True)
class SavedRollout:
    """One rollout of an incomplete group, as stored in a checkpoint."""

    index: int
    trajectories: list[Trajectory] | None = None
    """Trajectories of a complete rollout; None if the rollout is incomplete."""
    completions: list[Recorded] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Entry:
    """In-memory form of a `Recorded`. An entry stores only the tokens that no earlier entry contains, because the
    request of each turn repeats the tokens of all earlier turns."""

    before: _Entry | None
    """Entry whose prompt and sampled tokens are a prefix of this entry's prompt; None if there is none."""
    new: np.ndarray
    """Token ids of the prompt without those of `before`, int32."""
    completion: Completion
    routes_of: str | None = None
    """Key of a later response that stores the routed experts of this one (`Recorded.routes_of`); None if this one
    stores them."""

    @property
    def prompt(self) -> np.ndarray:
        """Token ids of the request's prompt, int32."""
        if self.before is None:
            return self.new
        return np.concatenate([self.before.tokens, self.new])

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of the prompt and the sampled tokens, int32."""
        parts: list[np.ndarray] = []
        entry: _Entry | None = self
        while entry is not None:
            parts += [entry.completion.token_ids, entry.new]
            entry = entry.before
        return np.concatenate(parts[::-1])


class Journal:
    """Record of the completions that one rollout has received, by request. It is saved in checkpoints, so that a
    resumed run can replay them."""

    def __init__(self, recorded: Sequence[Recorded] = ()) -> None:
        self._entries: dict[str, _Entry] = {}
        for entry in recorded:
            self._add(entry.key, entry.token_ids, entry.completion, entry.routes_of)
        by_key = {entry.key: entry for entry in recorded}
        self._replayed = {entry.key: _with_routes(entry, by_key) for entry in recorded}

    def replay(self, request: GenerationRequest) -> Completion | None:
        """Returns the response that an earlier run recorded for `request`, or None if there is none.

        Responses of the current run are not replayed, because a hook sends each request once.
        """
        if not self._replayed:
            return None
        return self._replayed.get(key_of(request))

    def record(self, request: GenerationRequest, completion: Completion) -> None:
        """Records `completion`, the tokens sampled so far for `request`, in place of an earlier record."""
        self._add(key_of(request), np.array(request.token_ids, np.int32), completion)

    def _add(self, key: str, token_ids: np.ndarray, completion: Completion, routes_of: str | None = None) -> None:
        before = self._continued_entry(key, token_ids)
        new = token_ids
        if before is not None:
            new = token_ids[len(before.tokens) :].copy()  # a slice without a copy would keep the whole array alive
            # Routed experts are large, and a turn returns those of all earlier positions too. They are stored twice
            # only if they differ, because another policy or version computed them. A later entry with the same key
            # replaces an incomplete one, so no entry may refer to its experts.
            if completion.finish_reason != "abort" and _routes_begin(completion, before.completion):
                _drop_routes(before)
                before.routes_of = key
        replaced = self._entries.get(key)
        if replaced is not None:  # other entries may still refer to this one's tokens
            _drop_routes(replaced)
        self._entries[key] = _Entry(before, new, completion, routes_of)

    def _continued_entry(self, key: str, token_ids: np.ndarray) -> _Entry | None:
        """Returns the newest entry whose tokens are a prefix of `token_ids`, other than the entry with the key `key`;
        None if there is no such entry."""
        for other, entry in reversed(self._entries.items()):
            if other != key and _begins(token_ids, entry):
                return entry
        return None

    @property
    def begun(self) -> bool:
        """True once a completion has been recorded."""
        return bool(self._entries)

    def entries(self) -> list[Recorded]:
        return [
            Recorded(key=key, token_ids=entry.prompt, completion=entry.completion, routes_of=entry.routes_of)
            for key, entry in self._entries.items()
        ]


@dataclass(slots=True)
class GroupProgress:
    """Progress of one group: trajectories of complete rollouts and journals of incomplete ones, by rollout index."""

    done: dict[int, list[Trajectory]] = field(default_factory=dict)
    journals: dict[int, Journal] = field(default_factory=dict)
    remote: int = 0
    """Number of complete rollouts that only the rollout worker of the group has."""

    @property
    def complete(self) -> int:
        """Number of complete rollouts."""
        return len(self.done) + self.remote

    def journal(self, index: int) -> Journal:
        return self.journals.setdefault(index, Journal())

    def finish(self, index: int, trajectories: list[Trajectory]) -> None:
        """Records that rollout `index` is complete. `trajectories`: its trajectories with rewards."""
        self.done[index] = trajectories
        self.journals.pop(index, None)

    def save(self) -> list[SavedRollout]:
        saved = [SavedRollout(index=index, trajectories=trajectories) for index, trajectories in self.done.items()]
        for index, journal in self.journals.items():
            if journal.begun:
                saved.append(SavedRollout(index=index, completions=journal.entries()))
        return sorted(saved, key=lambda rollout: rollout.index)

    @classmethod
    def restore(cls, saved: Sequence[SavedRollout]) -> GroupProgress:
        progress = cls()
        for rollout in saved:
            if rollout.trajectories is not None:
                progress.done[rollout.index] = rollout.trajectories
            else:
                progress.journals[rollout.index] = Journal(rollout.completions)
        return progress

    @property
    def begun(self) -> bool:
        """True once a token has been sampled or a rollout has completed."""
        return bool(self.done) or any(journal.begun for journal in self.journals.values())


def key_of(request: GenerationRequest) -> str:
    """Returns a hash of the request's tokens, images, sampling parameters and seed, the same in every process."""
    parameters = msgspec.json.encode([request.sampling, request.seed, *request.images], order="sorted")
    return fingerprint(np.array(request.token_ids, np.int32).tobytes() + parameters)


def _begins(token_ids: np.ndarray, entry: _Entry) -> bool:
    """Returns True if `token_ids` starts with all tokens of `entry`."""
    tokens = entry.tokens
    return len(token_ids) >= len(tokens) and np.array_equal(token_ids[: len(tokens)], tokens)


def _routes_begin(later: Completion, earlier: Completion) -> bool:
    """Returns True if the routed experts of `later` start with those of `earlier`."""
    routes = later.routed_experts
    begin = earlier.routed_experts
    return routes is not None and begin is not None and np.array_equal(routes[: len(begin)], begin)


def _with_routes(entry: Recorded, by_key: Mapping[str, Recorded]) -> Completion:
    """Returns the completion of `entry` with its routed experts, which are taken from a later entry in `by_key` if
    `entry` does not store them."""
    holder = entry
    while holder.routes_of is not None:
        holder = by_key[holder.routes_of]
    if holder is entry:
        return entry.completion
    routes = holder.completion.routed_experts
    if routes is not None:
        routes = routes[: len(entry.token_ids) + len(entry.completion.token_ids) - 1]
    return replace(entry.completion, routed_experts=routes)


def _drop_routes(entry: _Entry) -> None:
    entry.completion = replace(entry.completion, routed_experts=None)

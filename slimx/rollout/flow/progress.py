"""What is done of a group that is not complete, so that nothing sampled is sampled twice.

Of a rollout that is complete, its trajectories are kept, with their rewards. Of one that is not, every completion that
its hook got from the engines, the last one perhaps cut off in the middle. The hook is run again in a resumed run, from
its beginning: where it asks for what was sampled already (the same tokens to continue, the same seed, the same sampling
parameters) it gets that, and from there on the engines. No hook needs to know; one that asks for something else the
second time gets new tokens for it, as it must.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from slimx.data.records import Trajectory
from slimx.data.support import Support
from slimx.rollout.client.completion import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What one request of a hook brought so far."""

    key: str
    """Of the request: `key_of`."""
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

    def replay(self, key: str) -> Completion | None:
        """What an earlier run got for `key`. Within one run nothing is replayed: a request is made once."""
        entry = self._replayed.get(key)
        return entry.completion if entry is not None else None

    def record(self, key: str, token_ids: np.ndarray, completion: Completion) -> None:
        """Keep what was sampled. `token_ids`: the tokens that it continues."""
        for other, entry in self._recorded.items():
            whole = len(entry.token_ids) + len(entry.completion.token_ids)
            if other != key and entry.completion.routed_experts is not None and _begins(token_ids, entry, whole):
                # The later completion brings the routes of these positions too, and they are large.
                self._recorded[other] = replace(entry, completion=replace(entry.completion, routed_experts=None))
        self._recorded[key] = Recorded(key=key, token_ids=token_ids, completion=completion)

    def entries(self) -> list[Recorded]:
        return list(self._recorded.values())


@dataclass(slots=True)
class Progress:
    """Of one group, by the number of the rollout."""

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
    def restore(cls, saved: Sequence[SavedRollout]) -> Progress:
        out = cls()
        for rollout in saved:
            if rollout.trajectories is not None:
                out.done[rollout.index] = rollout.trajectories
            else:
                out.journals[rollout.index] = Journal(rollout.completions)
        return out

    @property
    def begun(self) -> bool:
        """Whether anything was sampled."""
        return bool(self.done) or any(journal.entries() for journal in self.journals.values())


def key_of(token_ids: np.ndarray, sampling: dict[str, Any], seed: int) -> str:
    """The same for the same request, in any process."""
    asked = msgspec.json.encode([sampling, seed], order="sorted")
    return hashlib.blake2b(token_ids.tobytes() + asked, digest_size=16).hexdigest()


def join(first: Completion, second: Completion, prompt: int) -> Completion:
    """`first`, which was cut off after `prompt` tokens and its own, and `second`, which continued it.

    Each token keeps the version, the log-prob and the routes of the request that sampled it."""
    count = len(first.token_ids)
    supports = [
        part.support if part.support is not None else Support.everything(len(part.token_ids))
        for part in (first, second)
    ]
    routes = None
    if first.routed_experts is not None and second.routed_experts is not None:
        # Rows go by input position: the first request's end before its own last token.
        rows = prompt + count - 1
        routes = np.concatenate([first.routed_experts[:rows], second.routed_experts[rows:]])
    return Completion(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        versions=_spans(first.versions, second.versions, count),
        finish_reason=second.finish_reason,
        routed_experts=routes,
        cached_tokens=first.cached_tokens,
        seconds=first.seconds + second.seconds,
        temperature=second.temperature,
        support=None if first.support is None and second.support is None else Support.join(supports),
    )


def _spans(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], count: int
) -> list[tuple[int, int, int]]:
    """One after the other; neighbours of the same version become one."""
    out = [tuple(span) for span in first]
    for start, stop, version in second:
        if out and out[-1][2] == version:
            out[-1] = (out[-1][0], count + stop, version)
        else:
            out.append((count + start, count + stop, version))
    return out


def _begins(token_ids: np.ndarray, entry: Recorded, whole: int) -> bool:
    """Whether `token_ids` begins with all that `entry` had and brought."""
    had = len(entry.token_ids)
    return (
        len(token_ids) >= whole
        and np.array_equal(token_ids[:had], entry.token_ids)
        and np.array_equal(token_ids[had:whole], entry.completion.token_ids)
    )

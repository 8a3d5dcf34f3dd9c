"""Journal of a worker's unfinished rollouts, from which its successor continues them.

Every completion that a hook receives, and every complete rollout, is appended to one file. Completions with routed
experts are not written: each repeats the experts of all earlier turns, so the file would grow with the square of the
number of turns. When the file has grown to a multiple of the size of the unfinished groups, it is written again with
these groups alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slimx.data.records import Trajectory
from slimx.data.saved.codec import decode, encode
from slimx.errors import SlimxError
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.progress import GroupProgress, Journal, Recorded, SavedRollout, key_of

GROWTH = 4
"""Multiple of the size of the unfinished groups to which the file may grow."""
SMALL = 16 * 2**20
"""Size in bytes up to which the file is not written again."""
_HEAD = 4
"""Number of bytes that contain an entry's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A completion of a rollout, or the trajectories of a complete rollout. An entry with neither begins or ends its
    group: entries before it do not count."""

    group: str
    index: int = 0
    shared: int = 0
    """Number of tokens that the prompt of `recorded` shares with the prompt and answer of the rollout's previous entry;
    they are left out."""
    recorded: Recorded | None = None
    trajectories: list[Trajectory] | None = None


class JournalFile:
    """The journal of one worker, open for appending."""

    def __init__(self, path: Path, saved: Mapping[str, list[SavedRollout]]):
        """Creates a file at `path`, in place of an earlier one. `saved`: progress of the groups in the earlier file."""
        self.path = path
        self._groups: dict[str, JournaledProgress] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._size = 0
        self._limit: float = SMALL
        for group, rollouts in saved.items():
            self.progress(group, rollouts)

    def progress(self, group: str, saved: list[SavedRollout]) -> JournaledProgress:
        """Returns the progress of a group that continues from `saved`."""
        progress = JournaledProgress(self, group, saved)
        self._groups[group] = progress
        self.append(Entry(group=group))
        progress.write()
        return progress

    def forget(self, group: str, progress: GroupProgress | None) -> None:
        """Removes `progress` of a finished or cancelled group."""
        if progress is not None and self._groups.get(group) is progress:  # the group may have begun anew
            del self._groups[group]
            self.append(Entry(group=group))

    def append(self, entry: Entry) -> None:
        data = encode(entry)
        self._file.write(len(data).to_bytes(_HEAD, "little") + data)
        self._size += _HEAD + len(data)
        if self._size > self._limit:
            self._rewrite()

    def close(self) -> None:
        """Removes the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        fresh = self.path.with_suffix(".new")
        self._file.close()
        self._file = fresh.open("wb", buffering=0)
        self._size = 0
        self._limit = float("inf")
        for progress in self._groups.values():
            progress.write()
        self._limit = max(SMALL, GROWTH * self._size)
        fresh.rename(self.path)


class JournaledProgress(GroupProgress):
    """Progress of a group, which is also written to a file."""

    def __init__(self, file: JournalFile, group: str, saved: list[SavedRollout]):
        restored = GroupProgress.restore(saved)
        journals: dict[int, Journal] = {}
        for rollout in saved:
            if rollout.trajectories is None:
                journals[rollout.index] = _RolloutJournal(self, rollout.index, rollout.completions)
        super().__init__(done=restored.done, journals=journals)
        self._to = file
        self._group = group
        self._last: dict[int, np.ndarray] = {}
        """Tokens of each unfinished rollout's last entry, prompt and answer, int32."""

    def journal(self, index: int) -> Journal:
        return self.journals.setdefault(index, _RolloutJournal(self, index))

    def finish(self, index: int, trajectories: list[Trajectory]) -> None:
        super().finish(index, trajectories)
        self._last.pop(index, None)
        self._to.append(Entry(group=self._group, index=index, trajectories=trajectories))

    def write(self) -> None:
        """Appends the whole progress to the file."""
        self._last.clear()
        for rollout in self.save():
            if rollout.trajectories is not None:
                self._to.append(Entry(group=self._group, index=rollout.index, trajectories=rollout.trajectories))
            for recorded in rollout.completions:
                self.record(rollout.index, recorded)

    def record(self, index: int, recorded: Recorded) -> None:
        """Appends a completion of rollout `index` to the file."""
        if recorded.completion.routed_experts is not None or recorded.routes_of is not None:
            return
        prompt = recorded.token_ids
        shared = _common(prompt, self._last.get(index, prompt[:0]))
        self._last[index] = np.concatenate([prompt, recorded.completion.token_ids])
        rest = replace(recorded, token_ids=prompt[shared:])
        self._to.append(Entry(group=self._group, index=index, shared=shared, recorded=rest))


class _RolloutJournal(Journal):
    """Journal of one rollout, which is also written to a file."""

    def __init__(self, progress: JournaledProgress, index: int, recorded: list[Recorded] | None = None):
        super().__init__(recorded or [])
        self._progress = progress
        self._index = index

    def record(self, request: GenerationRequest, completion: Completion) -> None:
        super().record(request, completion)
        token_ids = np.array(request.token_ids, np.int32)
        self._progress.record(self._index, Recorded(key=key_of(request), token_ids=token_ids, completion=completion))


def read_journal(path: Path) -> dict[str, list[SavedRollout]]:
    """Returns the progress of each group in a journal, by the group's id; {} without a file. An entry that was not
    written completely is ignored, with all that follows."""
    completions: dict[tuple[str, int], dict[str, Recorded]] = {}
    done: dict[tuple[str, int], list[Trajectory]] = {}
    last: dict[tuple[str, int], np.ndarray] = {}
    for entry in _entries(path):
        key = entry.group, entry.index
        if entry.trajectories is None and entry.recorded is None:
            for entries in (completions, done, last):
                for other in [other for other in entries if other[0] == entry.group]:
                    del entries[other]
        if entry.trajectories is not None:
            done[key] = entry.trajectories
        if entry.recorded is not None:
            new = entry.recorded.token_ids
            prompt = np.concatenate([last.get(key, new[:0])[: entry.shared], new])
            last[key] = np.concatenate([prompt, entry.recorded.completion.token_ids])
            by_request = completions.setdefault(key, {})
            by_request[entry.recorded.key] = replace(entry.recorded, token_ids=prompt)
    out: dict[str, list[SavedRollout]] = {}
    for group, index in sorted(completions.keys() | done.keys()):
        recorded = [] if (group, index) in done else list(completions[group, index].values())
        saved = SavedRollout(index=index, trajectories=done.get((group, index)), completions=recorded)
        out.setdefault(group, []).append(saved)
    return out


def _entries(path: Path) -> Iterator[Entry]:
    data = path.read_bytes() if path.exists() else b""
    start = 0
    while start + _HEAD <= len(data):
        stop = start + _HEAD + int.from_bytes(data[start : start + _HEAD], "little")
        if stop > len(data):
            return
        try:
            yield decode(Entry, data[start + _HEAD : stop])
        except SlimxError:
            return
        start = stop


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Returns the number of tokens with which both sequences start."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length

"""Journal of a worker's unfinished groups, from which its successor continues them.

Every completion that a hook receives, and every complete rollout, is appended to one file. Completions with routed
experts are not written: each repeats the experts of all earlier turns, so the file would grow with the square of the
number of turns. When the file has grown to a multiple of the size of the unfinished groups, it is written again with
these groups alone. Each process of a worker has a file of its own, because a lost one may still write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """A completion of a rollout, or the trajectories of a complete rollout. An entry with neither ends its job, whose
    other entries do not count."""

    job: int
    """Serial number of the job that generates the group. A group that is generated again has another one."""
    index: int = 0
    shared: int = 0
    """Number of tokens that the prompt of `recorded` shares with the prompt and answer of the rollout's previous entry;
    they are left out."""
    recorded: Recorded | None = None
    trajectories: list[Trajectory] | None = None


class JournalFile:
    """The journal of one process, open for appending."""

    def __init__(self, path: Path, saved: Mapping[int, list[SavedRollout]], small: int = SMALL):
        """Creates the file. `saved`: progress of the jobs in earlier files, by serial number. `small`: size in bytes up
        to which the file is not written again."""
        self.path = path
        self.failure: OSError | None = None
        """Error after which nothing is written any more; None while the file can be written."""
        self._jobs: dict[int, JournaledProgress] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb")
        self._size = 0
        self._small = self._limit = float(small)
        for job, rollouts in saved.items():
            self.progress(job, rollouts)

    def progress(self, job: int, saved: Sequence[SavedRollout]) -> JournaledProgress:
        """Returns the progress of a job that continues from `saved`."""
        progress = JournaledProgress(self, job, saved)
        self._jobs[job] = progress
        progress.write()
        return progress

    def forget(self, job: int) -> None:
        """Removes a finished or cancelled job."""
        if self._jobs.pop(job, None) is not None:
            self.append(Entry(job=job))

    def keeps(self, progress: JournaledProgress) -> bool:
        """Returns True until the job of `progress` is forgotten, or begins anew."""
        return self._jobs.get(progress.job) is progress

    def append(self, entry: Entry) -> None:
        """Writes an entry. After a failure, nothing is written: a worker without a journal only loses more."""
        if self.failure is not None:
            return
        data = encode(entry)
        try:
            self._file.write(len(data).to_bytes(_HEAD, "little") + data)
            self._file.flush()
            self._size += _HEAD + len(data)
            if self._size > self._limit:
                self._rewrite()
        except OSError as error:
            self.failure = error
            print(f"slimx: {self.path} cannot be written ({error}); a successor samples this worker's rollouts again")

    def close(self) -> None:
        """Removes the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        fresh = self.path.with_suffix(".new")
        earlier = self._file
        self._file = fresh.open("wb")
        earlier.close()
        self._size = 0
        self._limit = float("inf")
        for progress in self._jobs.values():
            progress.write()
        self._limit = max(self._small, GROWTH * self._size)
        fresh.rename(self.path)


class JournaledProgress(GroupProgress):
    """Progress of a group, which is also written to a file."""

    def __init__(self, file: JournalFile, job: int, saved: Sequence[SavedRollout]):
        restored = GroupProgress.restore(saved)
        journals: dict[int, Journal] = {}
        for rollout in saved:
            if rollout.trajectories is None:
                journals[rollout.index] = _RolloutJournal(self, rollout.index, rollout.completions)
        super().__init__(done=restored.done, journals=journals)
        self.job = job
        self._to = file
        self._last: dict[int, np.ndarray] = {}
        """Tokens of each unfinished rollout's last entry, prompt and answer, int32."""

    def journal(self, index: int) -> Journal:
        return self.journals.setdefault(index, _RolloutJournal(self, index))

    def finish(self, index: int, trajectories: list[Trajectory]) -> None:
        super().finish(index, trajectories)
        self._last.pop(index, None)
        self._append(Entry(job=self.job, index=index, trajectories=trajectories))

    def write(self) -> None:
        """Appends the whole progress to the file."""
        self._last.clear()
        for rollout in self.save():
            if rollout.trajectories is not None:
                self._append(Entry(job=self.job, index=rollout.index, trajectories=rollout.trajectories))
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
        self._append(Entry(job=self.job, index=index, shared=shared, recorded=rest))

    def _append(self, entry: Entry) -> None:
        if self._to.keeps(self):  # a hook may go on after its cancellation
            self._to.append(entry)


class _RolloutJournal(Journal):
    """Journal of one rollout, which is also written to a file."""

    def __init__(self, progress: JournaledProgress, index: int, recorded: Sequence[Recorded] = ()):
        super().__init__(recorded)
        self._progress = progress
        self._index = index

    def record(self, request: GenerationRequest, completion: Completion) -> None:
        super().record(request, completion)
        token_ids = np.array(request.token_ids, np.int32)
        self._progress.record(self._index, Recorded(key=key_of(request), token_ids=token_ids, completion=completion))


def read_journals(paths: Iterable[Path]) -> dict[int, list[SavedRollout]]:
    """Returns the progress of each unfinished job in the files, by serial number; files that do not exist are empty. An
    entry that was not written completely is ignored, with all that follow in its file."""
    found: dict[int, list[SavedRollout]] = {}
    for path in paths:
        for job, rollouts in _read(path).items():
            found[job] = merged(found.get(job, []), rollouts)
    return found


def merged(earlier: Iterable[SavedRollout], later: Iterable[SavedRollout]) -> list[SavedRollout]:
    """Returns the progress of a group that is known from two sources, of which `later` knows at least as much of each
    rollout that it contains, except completions with routed experts."""
    rollouts = {rollout.index: rollout for rollout in earlier}
    for rollout in later:
        known = rollouts.get(rollout.index)
        if known is not None and known.trajectories is None and rollout.trajectories is None:
            completions = {recorded.key: recorded for recorded in (*known.completions, *rollout.completions)}
            rollout = replace(rollout, completions=list(completions.values()))
        if known is None or known.trajectories is None:
            rollouts[rollout.index] = rollout
    return [rollouts[index] for index in sorted(rollouts)]


def _read(path: Path) -> dict[int, list[SavedRollout]]:
    jobs: dict[int, dict[int, SavedRollout]] = {}
    last: dict[tuple[int, int], np.ndarray] = {}
    for entry in _entries(path):
        if entry.trajectories is None and entry.recorded is None:
            jobs.pop(entry.job, None)
            continue
        rollouts = jobs.setdefault(entry.job, {})
        if entry.trajectories is not None:
            rollouts[entry.index] = SavedRollout(index=entry.index, trajectories=entry.trajectories)
        if entry.recorded is not None:
            new = entry.recorded.token_ids
            prompt = np.concatenate([last.get((entry.job, entry.index), new[:0])[: entry.shared], new])
            last[entry.job, entry.index] = np.concatenate([prompt, entry.recorded.completion.token_ids])
            rollout = rollouts.setdefault(entry.index, SavedRollout(index=entry.index))
            completions = [recorded for recorded in rollout.completions if recorded.key != entry.recorded.key]
            rollout.completions = [*completions, replace(entry.recorded, token_ids=prompt)]
    return {job: list(rollouts.values()) for job, rollouts in jobs.items()}


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

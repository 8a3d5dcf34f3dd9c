"""The journal of a worker: what its successor reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slimx.data.saved.codec import encode
from slimx.extras.rollout_workers.journal import JournalFile, merged, read_journals
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.progress import SavedRollout
from tests.unit.data.stored_stand import full_group


def completion(*tokens: int, reason: str = "stop", routes: bool = False) -> Completion:
    ids = np.array(tokens, np.int32)
    experts = np.zeros((len(ids), 1, 1), np.uint8) if routes else None
    return Completion(ids, -ids.astype(np.float32), [(0, len(ids), 0)], reason, experts, 0, 0.0)


def request(*tokens: int) -> GenerationRequest:
    return GenerationRequest(list(tokens), {"max_new_tokens": 4}, 1)


def read(path: Path) -> dict[int, bytes]:
    return {job: encode(saved) for job, saved in read_journals([path]).items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.journal"


def test_a_successor_reads_turns_and_complete_rollouts(path):
    file = JournalFile(path, {})
    progress = file.progress(7, [])
    progress.journal(0).record(request(1, 2), completion(3, reason="abort"))
    progress.journal(0).record(request(1, 2), completion(3, 4))
    progress.journal(0).record(request(1, 2, 3, 4, 5), completion(6))
    progress.journal(1).record(request(1, 2), completion(9))
    progress.finish(2, full_group(2).trajectories)
    assert read(path) == {7: encode(progress.save())}
    file.close()
    assert read(path) == {}


@pytest.mark.parametrize("cut", [1, 10])
def test_a_torn_entry_ends_the_file_and_loses_nothing_before_it(path, cut):
    file = JournalFile(path, {})
    progress = file.progress(7, [])
    progress.journal(0).record(request(1, 2), completion(3))
    before = read(path)
    progress.journal(0).record(request(1, 2, 3, 4), completion(5))
    assert read(path) != before
    path.write_bytes(path.read_bytes()[:-cut])
    assert read(path) == before


def test_jobs_that_ended_leave_the_file_and_late_entries_do_not_return(path):
    file = JournalFile(path, {}, small=2000)
    late = file.progress(1, [])
    late.journal(0).record(request(1), completion(2))
    file.forget(1)
    late.journal(0).record(request(1, 2, 3), completion(4))
    kept = file.progress(2, [])
    for turn in range(200):
        other = file.progress(3 + turn, [])
        other.journal(0).record(request(*range(50)), completion(turn))
        file.forget(3 + turn)
    kept.journal(0).record(request(1), completion(2))
    assert read(path) == {2: encode(kept.save())} and path.stat().st_size < 4000


def test_a_successor_continues_in_a_file_of_its_own(path, tmp_path):
    first = JournalFile(path, {})
    first.progress(7, []).journal(0).record(request(1, 2), completion(3))
    second = JournalFile(tmp_path / "second", read_journals([path]))
    first.close()
    assert [*read(tmp_path / "second")] == [7]
    again = second.progress(7, read_journals([tmp_path / "second"])[7])
    assert again.journal(0).replay(request(1, 2)).token_ids.tolist() == [3]


def test_completions_with_routes_come_from_the_checkpoint_alone(path):
    file = JournalFile(path, {})
    progress = file.progress(7, [])
    progress.journal(0).record(request(1, 2), completion(3, routes=True))
    progress.journal(1).record(request(1, 2), completion(4))
    saved = progress.save()
    assert [rollout.index for rollout in read_journals([path])[7]] == [1]
    assert encode(merged(saved, read_journals([path])[7])) == encode(saved)
    done = [SavedRollout(index=0, trajectories=full_group(1).trajectories)]
    assert merged(saved, done)[0].trajectories and merged(done, saved)[0].trajectories


def test_a_file_that_cannot_be_written_stops_no_rollout(path):
    file = JournalFile(path, {})
    progress = file.progress(7, [])
    file._file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        file._file = full
        progress.journal(0).record(request(1, 2), completion(3))
        progress.journal(0).record(request(1, 2, 3, 4), completion(5))
    assert file.failure is not None and len(progress.journal(0).entries()) == 2

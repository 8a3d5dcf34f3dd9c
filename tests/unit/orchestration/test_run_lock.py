"""One process trains in a run directory, also while others read it and whatever becomes of the lock file."""

from __future__ import annotations

import threading
from pathlib import Path

from slimx.errors import SlimxError
from slimx.observability.live.run_lock import LOCK, is_locked, locked


def refused(directory: Path) -> bool:
    try:
        with locked(directory):
            return False
    except SlimxError as error:
        assert error.code == "run.locked" and error.about == str(directory)
        return True


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    with locked(tmp_path):
        assert refused(tmp_path)
    assert not refused(tmp_path)


def test_removing_the_lock_file_does_not_release_the_lock(tmp_path):
    with locked(tmp_path):
        (tmp_path / LOCK).unlink()
        assert refused(tmp_path)


def test_watchers_never_prevent_the_start_of_a_run(tmp_path):
    (tmp_path / LOCK).touch()
    over, looks = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            looks.append(is_locked(tmp_path))

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        starts = [refused(tmp_path) for _ in range(3000)]
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
    assert not any(starts)
    assert len(looks) > 100


def test_a_lock_is_seen_regardless_of_lock_files(tmp_path):
    assert not is_locked(tmp_path)
    (tmp_path / LOCK).touch()
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_directory_that_does_not_exist_is_made_and_locked(tmp_path):
    directory = tmp_path / "absent" / "run"
    assert not is_locked(directory)
    with locked(directory):
        assert is_locked(directory)

"""The directory of temporary files that one user alone can enter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from slimx.runtime.user_files import private_directory
from tests.refusals import refused


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of the test's own; pytest's is too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_others_cannot_enter_it_also_where_it_was_open_before(temporary: Path) -> None:
    found = private_directory()
    assert found.parent == temporary and found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o777)
    assert private_directory() == found and found.stat().st_mode & 0o777 == 0o700


def test_one_that_another_user_may_have_made_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = temporary / "elsewhere"
    target.mkdir()
    place = temporary / f"slimx-{os.getuid()}"
    place.symlink_to(target)
    with refused("tmpdir.owner", about=str(place)):
        private_directory()
    place.unlink()
    place.mkdir(mode=0o700)
    os.chown(place, os.getuid() or 12345, -1) if os.getuid() == 0 else pytest.skip("only root gives files away")
    with refused("tmpdir.owner", about=str(place)):
        private_directory()


def test_a_path_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    with refused("tmpdir.length", about="TMPDIR"):
        private_directory()


def test_one_in_which_nothing_can_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with refused("tmpdir.unwritable", about="TMPDIR"):
        private_directory()

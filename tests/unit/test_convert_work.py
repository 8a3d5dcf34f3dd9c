"""How files of a conversion are written: resumed, checked, all or nothing, and nobody else's files touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimx.convert import work
from slimx.convert.work import convert
from slimx.errors import SlimxError
from tests.unit.convert_stand import content


class Numbered:
    """A file of bytes that may fail, or end the process, in its middle."""

    def __init__(self, number: int, how: str = ""):
        self.name, self.nbytes, self.number, self.how = f"f{number}", 2000, number, how

    def write(self, stream: work.Stream) -> int:
        stream.write(bytes([self.number]) * 1000)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        stream.write(bytes([self.number]) * 1000)
        return self.number


class Numbers:
    """Four files; one may fail."""

    def __init__(self, how: str = "", which: int = 2, fingerprint: str = "numbers"):
        self.files = [Numbered(number, how if number == which else "") for number in range(4)]
        self.fingerprint = fingerprint

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    small = ("notes",)

    def compare(self, directory: Path, advance: Callable[[int], None]) -> None:
        """Their bytes say which file they are of."""
        for file in self.files:
            assert set((directory / file.name).read_bytes()) == {file.number}

    def finish(self, directory: Path, notes: Any) -> None:
        (directory / "notes").write_text(json.dumps(notes, sort_keys=True))


def test_a_killed_conversion_goes_on_after_its_finished_files_and_gives_the_same_bytes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_convert_work import Numbers; "
        "from slimx.convert.work import convert; convert(Numbers('kill'), Path(sys.argv[1]), threads=1, verify=False)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists() and (partial / "f2.writing").is_file()
    before = {name: (partial / name).stat().st_mtime_ns for name in ("f0", "f1")}
    convert(Numbers(), tmp_path / "out", threads=1, verify=True)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before
    convert(Numbers(), tmp_path / "whole", threads=3, verify=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert content(tmp_path / "out").keys() == {"f0", "f1", "f2", "f3", "notes"}
    assert not partial.exists()


def test_a_disk_that_becomes_full_is_one_sentence_and_finished_files_wait(tmp_path):
    with pytest.raises(SlimxError, match="no space is left on its disk; make room and run the same command again"):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert {name for name in content(tmp_path / "out.partial") if "/" not in name} == {"f0", "f1"}
    with pytest.raises(SlimxError, match="no space"):
        convert(Numbers("full", which=0), tmp_path / "nothing", threads=1, verify=False)
    assert not (tmp_path / "nothing.partial").exists(), "nothing was finished, so nothing is left"


def test_the_partial_output_of_another_conversion_is_refused(tmp_path):
    with pytest.raises(SlimxError):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    with pytest.raises(SlimxError, match=r"out\.partial was begun by a conversion of other files"):
        convert(Numbers(fingerprint="others"), tmp_path / "out", threads=1, verify=False)
    convert(Numbers(), tmp_path / "out", threads=1, verify=False)


def test_two_processes_do_not_write_one_output(tmp_path):
    class Nested(Numbers):
        def finish(self, directory: Path, notes: Any) -> None:
            with pytest.raises(SlimxError, match="another process is writing it"):
                convert(Numbers(), tmp_path / "out", threads=1, verify=False)
            super().finish(directory, notes)

    convert(Nested(), tmp_path / "out", threads=1, verify=False)
    assert (tmp_path / "out/notes").is_file()


def test_bytes_that_changed_on_disk_are_found_by_verification(tmp_path):
    class Changed(Numbers):
        def finish(self, directory: Path, notes: Any) -> None:
            with (directory / "f1").open("r+b") as file:
                file.write(b"x")

    with pytest.raises(SlimxError, match=r"f1: has other bytes than were written"):
        convert(Changed(), tmp_path / "out", threads=1, verify=True)
    assert not (tmp_path / "out").exists()
    convert(Numbers(), tmp_path / "out", threads=1, verify=True)
    assert content(tmp_path / "out")["f1"] == b"\1" * 2000

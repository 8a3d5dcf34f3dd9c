"""Writing of a conversion's files: resumed, checked, all or nothing, and without touching foreign files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimx.errors import SlimxError
from slimx.extras.convert import run, work
from slimx.extras.convert.work import convert
from tests.checkpoint_stand import write_checkpoint
from tests.extras.convert.convert_stand import WIDE, content
from tests.refusals import refused


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
        """Checks that every file has the bytes that identify it."""
        for file in self.files:
            assert set((directory / file.name).read_bytes()) == {file.number}

    def finish(self, directory: Path, notes: Any) -> None:
        (directory / "notes").write_text(json.dumps(notes, sort_keys=True))


def test_a_killed_conversion_continues_to_the_same_bytes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.extras.convert.test_convert_work import Numbers; "
        "from slimx.extras.convert.work import convert; "
        "convert(Numbers('kill'), Path(sys.argv[1]), threads=1, verify=False)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
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
    with refused("convert.space", about=str(tmp_path / "out.partial")):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert {name for name in content(tmp_path / "out.partial") if "/" not in name} == {"f0", "f1"}
    with refused("convert.space", about=str(tmp_path / "nothing.partial")):
        convert(Numbers("full", which=0), tmp_path / "nothing", threads=1, verify=False)
    assert not (tmp_path / "nothing.partial").exists(), "nothing was finished, so nothing is left"


def test_the_partial_output_of_another_conversion_is_refused(tmp_path):
    with pytest.raises(SlimxError):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    with refused("convert.other", about=str(tmp_path / "out.partial")):
        convert(Numbers(fingerprint="others"), tmp_path / "out", threads=1, verify=False)
    convert(Numbers(), tmp_path / "out", threads=1, verify=False)


def test_two_processes_do_not_write_one_output(tmp_path):
    class Nested(Numbers):
        def finish(self, directory: Path, notes: Any) -> None:
            with refused("convert.busy", about=str(tmp_path / "out.partial")):
                convert(Numbers(), tmp_path / "out", threads=1, verify=False)
            super().finish(directory, notes)

    convert(Nested(), tmp_path / "out", threads=1, verify=False)
    assert (tmp_path / "out/notes").is_file()


def test_bytes_that_changed_on_disk_are_found_by_verification(tmp_path):
    class Changed(Numbers):
        def finish(self, directory: Path, notes: Any) -> None:
            with (directory / "f1").open("r+b") as file:
                file.write(b"x")

    with refused("convert.bytes", about="f1"):
        convert(Changed(), tmp_path / "out", threads=1, verify=True)
    assert not (tmp_path / "out").exists()
    convert(Numbers(), tmp_path / "out", threads=1, verify=True)
    assert content(tmp_path / "out")["f1"] == b"\1" * 2000


def test_a_finished_file_whose_bytes_have_changed_is_written_again(tmp_path):
    with pytest.raises(SlimxError):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    changed = tmp_path / "out.partial" / "f1"
    before = changed.stat()
    changed.write_bytes(b"x" * 2000)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    convert(Numbers(), tmp_path / "out", threads=1, verify=False)
    assert content(tmp_path / "out")["f1"] == b"\1" * 2000


# What is not the conversion's own -------------------------------------------------------------------------------------


def put(path: Path, how: str) -> None:
    """Puts something of a user's at `path`: a file, a folder or a link."""
    if how == "file":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    elif how == "folder":
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("nowhere")


def tree(directory: Path) -> dict[str, Any]:
    return {str(p.relative_to(directory)): p.lstat().st_mtime_ns for p in sorted(directory.rglob("*"))}


FOREIGN = [
    ("out.partial", "file"),
    ("out.partial", "folder"),
    ("out.partial", "link"),
    ("out.partial/notes.txt", "file"),
    ("out.partial/draft.writing", "file"),
    ("out.partial/f1", "file"),
    ("out.partial/deep/f1", "file"),
    ("out.partial/.conversion/mine", "file"),
    ("out.partial/.conversion/done/mine", "folder"),
]


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(("name", "how"), FOREIGN)
def test_foreign_files_are_refused_by_name_and_left_unchanged(tmp_path, monkeypatch, name, how, free):
    put(tmp_path / name, how)
    if not free:  # the case that once deleted everything
        monkeypatch.setattr(os, "statvfs", full_disk(os.statvfs(tmp_path)))
    before = tree(tmp_path)
    with pytest.raises(SlimxError) as error:
        convert(Numbers(), tmp_path / "out", threads=1, verify=False)
    assert error.value.code == "convert.foreign"
    assert str(tmp_path / name).startswith(error.value.about)
    assert tree(tmp_path) == before


def full_disk(real: os.statvfs_result) -> Callable[[Any], os.statvfs_result]:
    return lambda path: os.statvfs_result([*real[:4], 10, *real[5:]])


@pytest.mark.parametrize("name", ["draft.writing", "deep/notes", "f1.writing/mine"])
def test_a_foreign_file_among_finished_ones_stops_the_next_try(tmp_path, name):
    with pytest.raises(SlimxError):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    partial = tmp_path / "out.partial"
    put(partial / name, "file")
    before = content(partial)
    with pytest.raises(SlimxError) as error:
        convert(Numbers(), tmp_path / "out", threads=1, verify=False)
    assert error.value.code == "convert.foreign"
    assert str(partial / name).startswith(error.value.about)
    assert content(partial) == before


def test_foreign_files_survive_an_abandoned_conversion(tmp_path):
    class WithForeign(Numbers):
        def writing(self) -> contextlib.AbstractContextManager[None]:
            put(tmp_path / "out.partial/mine", "file")
            return contextlib.nullcontext()

    with pytest.raises(SlimxError):
        convert(WithForeign("full", which=0), tmp_path / "out", threads=1, verify=False)
    assert content(tmp_path) == {"out.partial/mine": b"mine"}


@pytest.mark.parametrize("how", ["file", "folder", "link"])
def test_a_name_that_is_taken_is_found_before_any_work(tmp_path, how):
    put(tmp_path / "out", how)
    numbers = Numbers("full", which=0)
    with pytest.raises(SlimxError) as error:
        convert(numbers, tmp_path / "out", threads=1, verify=False)
    assert (error.value.code, error.value.about) == ("convert.exists", str(tmp_path / "out"))
    assert list(tree(tmp_path)) == ["out"]


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path):
    with pytest.raises(SlimxError) as error:
        convert(Numbers(), tmp_path / ("x" * 300), threads=1, verify=False)
    assert error.value.code == "convert.system"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [run.hf_to_megatron, run.hf_to_fp8])
def test_a_file_that_cannot_be_written_to_its_end_is_one_sentence(tmp_path, make):
    """The sentence is the system's even through torch's writer, which says only that a write has failed."""
    source = write_checkpoint(tmp_path / "source", WIDE)
    conversion, limits = make(source), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(SlimxError) as error:
            convert(conversion, tmp_path / "out", threads=1, verify=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.code == "convert.system"
    assert isinstance(error.value.__cause__, OSError) and error.value.__cause__.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

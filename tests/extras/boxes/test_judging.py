"""The archive that tests run on, of archives that a model may have written."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest

from slimx.extras.agents.toolbox import ToolsLost
from slimx.extras.boxes.programs.enclosure import ProgramResult
from slimx.extras.boxes.protocol import BoxRefusal
from slimx.extras.boxes.terminal.judging import NoVerdict, judged, verdict
from slimx.extras.boxes.terminal.tasks import Checks, Task
from slimx.extras.boxes.terminal.toolbox import Terminal
from tests.extras.boxes.box_stand import link, plain
from tests.refusals import refused

MOST = 2**16


def tar(*members: tarfile.TarInfo | tuple[str, bytes], mode: str = "w") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for entry in members:
            member, content = (entry, bytes(entry.size)) if isinstance(entry, tarfile.TarInfo) else (None, entry[1])
            if member is None:
                member = plain(entry[0], len(content))  # type: ignore[index]
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def folder(name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.mode = tarfile.DIRTYPE, 0o755
    return made


def carried(left: bytes, began: bytes = tar(), *kept: str, tests: Path | None = None) -> dict[str, bytes | str | None]:
    """Returns the files that the tests get: contents of files, targets of links, None for directories."""
    archive = judged(left, began, Task(tests=Checks(command=("true",), files=tests), kept=kept), MOST)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        return {
            member.name: opened.extractfile(member).read() if member.isreg() else member.linkname or None  # type: ignore[union-attr]
            for member in opened
        }


def test_kept_files_are_restored_and_tests_replace_all(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_bytes(b"test")
    left = tar(
        folder("src"), ("./src/a.py", b"new"), ("setup.cfg", b"lax"), ("own.cfg", b"mine"), link("b.py", "src/a.py")
    )
    began = tar(("./src/a.py", b"old"), ("setup.cfg", b"strict"), ("gone.cfg", b"kept"))
    assert carried(left, began, "*.cfg", tests=tmp_path) == {
        "src": None, "src/a.py": b"new", "b.py": "src/a.py", "setup.cfg": b"strict", "gone.cfg": b"kept",
        "tests/test_a.py": b"test",
    }  # fmt: skip
    for entry in (
        link("tests", "/nowhere"),
        ("tests/test_a.py", b"broken"),
        folder("tests/test_a.py/deep"),
        ("tests", b""),
    ):
        assert carried(tar(entry), tests=tmp_path) == {"tests/test_a.py": b"test"}


@pytest.mark.parametrize(
    ("kept", "began"),
    [("tests/*", ["tests/test_a.py"]), ("tests/*", []), ("*.py", ["tests/test_a.py"]), ("t*/conf*", []),
     ("*ests/conftest.py", []), ("te?ts/conftest.py", []), ("tests/a/*", ["tests/a/b"])],
)  # fmt: skip
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_no_link_leads_to_kept_files(kept, began, kind):
    left = tar(("mine/conftest", b"mine"), link("tests", "mine", kind))
    found = carried(left, tar(*((name, b"began") for name in began)), kept)
    assert found == {"mine/conftest": b"mine"} | dict.fromkeys(began, b"began")


def test_links_and_files_that_lead_to_no_kept_ones_are_carried():
    left = tar(link("run", "bin/run"), ("test_new.txt", b"new"), ("tests.md", b"text"))
    assert carried(left, tar(), "*.cfg", "tests/*", "test_*.py") == {
        "run": "bin/run", "test_new.txt": b"new", "tests.md": b"text",
    }  # fmt: skip


def test_nothing_is_unpacked_through_a_link_of_the_archive():
    assert carried(tar(link("a", "tests"), ("a/conftest.py", b"mine")), tar(), "tests/*") == {"a": "tests"}


def test_a_header_means_the_same_to_all_who_read_it():
    hidden = link("a", "mine")
    hidden.pax_headers = {"GNU.sparse.name": "tests", "path": "a", "SCHILY.xattr.user.x": "y"}
    cut = link("other", "mine")
    cut.pax_headers = {"path": "tests\0other"}  # which ends at the NUL in a header of another form
    archive = judged(tar(hidden, cut), tar(), Task(tests=Checks(command=("true",))), MOST)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        assert [(member.name, member.pax_headers) for member in opened] == [("a", {})]


def sparse(size: int) -> bytes:
    member = plain("zeros", 512)
    member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(size),
                          "GNU.sparse.map": f"{size},0"}  # fmt: skip
    return tar(member)


def test_a_sparse_file_of_a_terabyte_is_not_carried():
    assert carried(sparse(2**40)) == {}


def global_name() -> bytes:
    """Makes an archive with one long path for all members."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", pax_headers={"linkpath": "x" * 4096}) as archive:
        for number in range(64):
            archive.addfile(link(f"a{number}", "b"))
    return made.getvalue()


@pytest.mark.parametrize(
    "left",
    [
        tar(("a", bytes(2 * MOST)), mode="w:gz"),
        tar(("a", bytes(MOST // 2)), ("b", bytes(MOST // 2))),
        global_name(),
        b"no archive",
        tar(("a", b"whole"))[:520],
        b"".join(tar(plain(100 * "n" + "long", 0))[:1024] for _ in range(2000)),
    ],
    ids=["compressed", "too large", "one link for all", "no archive", "cut off", "a chain of headers"],
)
def test_files_that_cannot_be_copied_give_no_verdict(left):
    with pytest.raises(NoVerdict):
        carried(left)


class Boxes:
    """A box of the model or a fresh one, which may take no file, and whose programs all say the same."""

    def __init__(self, refusal: str | None, says: str = ""):
        self.refusal, self.says = refusal, says

    def run(self, command, **_):
        return ProgramResult(self.says, "", "exit", 0, 0.0)

    def get(self, path, most):
        return tar()

    def put(self, path, content):
        if self.refusal is not None:
            raise BoxRefusal("no", code=self.refusal, about=path)

    def end(self):
        pass


async def test_a_fresh_box_that_refuses_files_is_not_a_failure_of_the_model(monkeypatch):
    terminal = Terminal()
    terminal._task, terminal._box = Task(tests=Checks(command=("true",))), Boxes("large")  # type: ignore[assignment]
    monkeypatch.setattr(terminal, "_begin", lambda task, seconds=None: Boxes("large"))
    with refused("tools.lost", kind=ToolsLost):
        await terminal.judge([])


@pytest.mark.parametrize(
    ("expect", "passes"),
    [(["^OK$"], True), (["Ran 2", "^OK$"], True), (["^Ran$"], False), (["^OK$", "^2"], False)],
)
def test_the_expected_output_of_tests_is_matched_in_each_line(expect, passes):
    box = Boxes(None, says="Ran 2 tests\nOK\n")
    assert (
        verdict(
            box,
            tar(),
            Task(
                tests=Checks(command=("true",), expect=tuple(re.compile(pattern, re.MULTILINE) for pattern in expect))
            ),
        )[0]
        is passes
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", {"command": "echo \0"}),
        ("shell", {"command": "echo \ud800"}),
        ("shell", {"command": 100_001 * "x"}),
        ("read_file", {"path": 2049 * "a"}),
        ("write_file", {"path": "a", "content": "\ud800"}),
    ],
)
async def test_impossible_program_arguments_are_a_tool_error(name, arguments):
    terminal = Terminal()
    assert (await terminal.call(name, arguments)).error == "bad_arguments"  # and no box was asked


def test_tests_that_a_server_would_not_take_are_refused_before_the_run(tmp_path):
    terminal = Terminal(box={"backend": "remote", "url": "http://127.0.0.1:9"}, work_mib=64)
    with refused("task.tests", about="tests.files"):
        terminal._check_size(Task(tests=Checks(command=("true",), files=tmp_path)))
    Terminal(box={"backend": "remote", "url": "http://127.0.0.1:9"})._check_size(
        Task(tests=Checks(command=("true",), files=tmp_path))
    )

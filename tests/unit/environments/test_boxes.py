"""A box keeps its files, holds its programs to limits, lets nothing out by its links, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest

from slimx.environments.boxes import roots
from slimx.environments.boxes.bubblewrap import BubblewrapBox
from slimx.environments.sandbox import Limits
from tests.refusals import refused

pytestmark = [pytest.mark.costly, pytest.mark.needs("bwrap", "unshare", "prlimit", "cp", "rm")]

SMALL = Limits(seconds=60.0, memory_mib=128, processes=8, disk_mib=8)


@pytest.fixture
def base():
    """A directory that the user nobody reaches, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)
        assert list(Path(directory).glob(f"{roots.PREFIX}*")) == [], "every box has ended"


@pytest.fixture
def box(base, image):
    made = BubblewrapBox(image, SMALL, host_usr=True, base=base)
    yield made
    made.end()


@pytest.fixture
def image(tmp_path):
    return archive(tmp_path / "image.tar", link("bin", "usr/bin"), link("lib", "usr/lib"), link("lib64", "/usr/lib64"))


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as file:
        for member in members:
            file.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


def plain(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def python(box: BubblewrapBox, program: str, **options: object):
    return box.run(["python3", "-c", program], **options)


# What it is for -----------------------------------------------------------------------------------------------------


def test_files_stay_from_one_program_to_the_next_and_go_in_and_out(box):
    box.put("/work/a/in.txt", b"6 7")
    ran = box.run(
        ["sh", "-c", "read x y < in.txt; echo $((x * y)) > out.txt; cat; exit 3"], stdin="said", cwd="/work/a"
    )
    assert (ran.ended, ran.status, ran.stdout) == ("exit", 3, "said")
    assert box.get("/work/a/out.txt", 100) == b"42\n"
    box.put("/work/a/out.txt", b"1")
    assert box.run(["cat", "/work/a/out.txt"]).stdout == "1", "a shorter file leaves nothing of the longer one"


def test_a_box_begun_from_a_snapshot_has_its_files_and_changes_none_of_it(box, base, tmp_path):
    box.put("/kept", b"before")
    box.snapshot(tmp_path / "snapshot")
    box.put("/kept", b"after")
    other = BubblewrapBox(tmp_path / "snapshot", SMALL, host_usr=True, base=base)
    try:
        assert other.get("/kept", 10) == b"before"
        other.put("/kept", b"other")
    finally:
        other.end()
    assert (tmp_path / "snapshot/kept").read_bytes() == b"before" and box.get("/kept", 10) == b"after"


def test_a_root_with_programs_of_its_own_needs_nothing_of_the_machine(base, tmp_path):
    root = tmp_path / "root"
    listed = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout.split()
    for path in ["/bin/sh", *(word for word in listed if word.startswith("/"))]:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / path[1:]).write_bytes(Path(path).read_bytes())
        (root / path[1:]).chmod(0o755)
    made = BubblewrapBox(root, SMALL, base=base)
    try:
        assert made.run(["/bin/sh", "-c", "echo /*; [ -e /usr/bin/python3 ] || echo none"]).stdout.splitlines()[1:] == [
            "none"
        ]
    finally:
        made.end()


# Ways out -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/way/file", "/way/new/file"])
def test_files_are_not_read_or_written_over_a_link_that_the_box_made(box, base, place):
    outside = base / "outside"
    outside.mkdir(mode=0o777)
    (outside / "file").write_bytes(b"secret")
    assert box.run(["ln", "-s", str(outside), "/way"]).ok
    with refused("box.file", about=place):
        box.get(place, 100)
    with refused("box.file", about=place):
        box.put(place, b"x")
    assert {each.name: each.read_bytes() for each in outside.iterdir()} == {"file": b"secret"}


@pytest.mark.parametrize(
    "make", ["ln -s /etc/passwd /it", "mkfifo /it", "mkdir /it"], ids=["link", "fifo", "directory"]
)
def test_only_plain_files_are_read_and_written_and_nothing_waits_for_a_pipe(box, make):
    assert box.run(["sh", "-c", make]).ok
    with refused("box.file", about="/it"):
        box.get("/it", 100)
    with refused("box.file", about="/it"):
        box.put("/it", b"x")


@pytest.mark.parametrize("path", ["relative", "/", "/a/../../etc/passwd", "/.."])
def test_a_path_that_is_none_of_a_file_is_refused(box, path):
    with refused("box.path", about=path):
        box.get(path, 100)


def test_a_file_larger_than_allowed_is_not_read(box):
    box.put("/large", bytes(101))
    with refused("box.large", about="/large"):
        box.get("/large", 100)


@pytest.mark.parametrize("name", ["proc", "dev"])
def test_a_link_where_bubblewrap_mounts_leads_it_nowhere(box, base, name):
    outside = base / "outside"
    outside.mkdir(mode=0o777)
    root = box._root.path
    (root / name).rmdir() if (root / name).exists() else None
    os.symlink(f"/oldroot{outside}", root / name)
    assert box.run(["sh", "-c", "test -d /proc/self && test -c /dev/null"]).ok
    assert list(outside.iterdir()) == [] and (root / name).is_dir() and not (root / name).is_symlink()


def test_a_root_that_the_box_has_closed_to_itself_still_opens(box):
    box.run(["chmod", "000", "/"])
    assert box.run(["true"]).ok


def test_the_machine_outside_cannot_be_seen_or_written(box):
    ran = python(
        box,
        "import os\n"
        "print(sorted(os.listdir('/')), os.getuid(), open('/proc/self/status').read().split('CapBnd:')[1].split()[0])\n"
        "for path in ('/usr/x', '/dev/x'):\n"
        "    try: open(path, 'w'); print('wrote', path)\n"
        "    except OSError: pass\n"
        "try: os.memfd_create('x'); print('memfd')\n"
        "except PermissionError: pass\n"
        "print(len(os.listdir('/sys/class/net')) if os.path.exists('/sys') else 'no sys')",
    )
    assert ran.stdout == (
        "['bin', 'dev', 'lib', 'lib64', 'proc', 'usr'] 65534 0000000000000000\nno sys\n"
    ), ran.stderr  # fmt: skip


# Limits -------------------------------------------------------------------------------------------------------------

FILL = "import os, time\n"


@pytest.mark.parametrize(
    "program",
    [
        "for n in range(4): open(f'/{n}', 'wb').write(bytes(3 * 2**20))\ntime.sleep(300)",
        "for n in range(10**6): open(f'/{n}', 'w').close()\ntime.sleep(300)",
        "held = [open(f'/{n}', 'wb') for n in range(4)]\n"
        "for n, file in enumerate(held): os.unlink(f'/{n}'); file.write(bytes(3 * 2**20)); file.flush()\n"
        "time.sleep(300)",
        "for n in range(3000): os.mkdir('d' * 9); os.chdir('d' * 9)\ntime.sleep(300)",
        "for n in range(4): open(f'/{n}', 'wb').write(bytes(3 * 2**20))",
    ],
    ids=["files", "entries", "deleted files", "deep directories", "files at the end"],
)
def test_a_box_that_fills_its_disk_is_ended_and_removed(box, program):
    ran = python(box, FILL + program)
    assert ran.ended == "disk" and ran.seconds < SMALL.seconds


def test_a_file_alone_cannot_be_larger_than_the_disk(box):
    ran = python(box, "open('/x', 'wb').truncate(9 * 2**20)")
    assert ran.ended == "exit" and ran.status != 0 and box.get("/x", 0) == b""


@pytest.mark.parametrize(
    ("program", "limits", "ended"),
    [
        ("import time; time.sleep(300)", Limits(seconds=1.0), "time"),
        ("while True: print('x' * 1000)", SMALL, "output"),
    ],
)
def test_a_program_is_ended_at_its_limit_and_the_box_goes_on(base, image, program, limits, ended):
    made = BubblewrapBox(image, limits, host_usr=True, base=base)
    try:
        assert python(made, program).ended == ended
        assert made.run(["true"]).ok
    finally:
        made.end()


def test_what_a_program_leaves_behind_has_ended_with_it(box):
    began = time.monotonic()
    assert box.run(["sh", "-c", "(sleep 2; echo late > /late) > /dev/null 2>&1 & exit 0"]).ok
    time.sleep(max(0.0, 3 - (time.monotonic() - began)))
    with refused("box.file", about="/late"):
        box.get("/late", 100)


def test_a_command_that_is_not_there_has_failed_by_itself(box):
    ran = box.run(["no-such-program"])
    assert (ran.ended, ran.status) == ("exit", 127)
    assert box.run(["true"], cwd="/none").status == 127


def test_ending_a_box_ends_what_runs_in_it(box):
    ended = []
    thread = threading.Thread(target=lambda: ended.append(python(box, "import time; time.sleep(300)").ended))
    thread.start()
    time.sleep(0.5)
    box.end()
    thread.join(60)
    assert ended == ["stop"]
    with refused("box.ended", about="box"):
        box.run(["true"])


def test_a_box_whose_owner_died_is_removed_by_the_next_sweep_and_a_living_one_is_not(box, base, image):
    program = (
        "import os, sys; from pathlib import Path; from slimx.environments.boxes.bubblewrap import BubblewrapBox\n"
        "BubblewrapBox(Path(sys.argv[1]), base=Path(sys.argv[2])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, image, base], check=True, timeout=120)
    assert len(list(base.glob(f"{roots.PREFIX}*"))) == 2
    assert roots.sweep(base) == 1
    assert box.run(["true"]).ok


# Images -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "code", "about"),
    [
        (link("up", "../../outside"), "box.member", "up"),
        (link("hard", "../outside", tarfile.LNKTYPE), "box.member", "hard"),
        (link("device", "", tarfile.BLKTYPE), "box.member", "device"),
        (plain("../over", 1), "box.member", "../over"),
        (plain("bomb", 2 * 2**20), "box.large", None),
    ],
    ids=["link", "hard link", "device", "name", "bomb"],
)
def test_an_image_that_leads_out_or_is_too_large_is_refused_and_leaves_nothing(base, tmp_path, member, code, about):
    made = archive(tmp_path / "bad.tar", plain("good", 1), member)
    with refused(code, about=about or str(made)):
        BubblewrapBox(made, base=base, image_mib=1)


@pytest.mark.parametrize(("content", "code"), [(None, "box.source"), (b"no archive", "box.image")])
def test_an_image_that_is_not_there_or_no_archive_is_refused(base, tmp_path, content, code):
    path = tmp_path / "image.tar"
    if content is not None:
        path.write_bytes(content)
    with refused(code, about=str(path)):
        BubblewrapBox(path, base=base)

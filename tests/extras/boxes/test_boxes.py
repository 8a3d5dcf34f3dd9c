"""A box keeps its files, holds its programs to limits, lets nothing out by its links, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.bubblewrap import BubblewrapBox
from tests.extras.boxes.box_stand import SMALL, archive, link, plain
from tests.refusals import refused

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit", "cp", "rm")


@pytest.fixture
def base():
    """A directory that an unprivileged user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)
        assert list(Path(directory).glob(f"{rootfs.PREFIX}*")) == [], "every box has ended"


@pytest.fixture
def box(base, image):
    made = BubblewrapBox(image, SMALL, host_usr=True, base=base)
    yield made
    made.end()


@pytest.fixture(name="image")
def _image(tmp_path):
    return archive(tmp_path / "image.tar", link("bin", "usr/bin"), link("lib", "usr/lib"), link("lib64", "/usr/lib64"))


def python(box: BubblewrapBox, program: str, **options: object):
    return box.run(["python3", "-c", program], **options)


# What it is for -----------------------------------------------------------------------------------------------------


def test_a_self_contained_root_needs_no_programs_of_the_machine(base, tmp_path):
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
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"file": b"secret"}


@pytest.mark.parametrize("name", ["proc", "dev"])
def test_a_link_where_bubblewrap_mounts_leads_it_nowhere(box, base, name):
    outside = base / "outside"
    outside.mkdir(mode=0o777)
    root = box._root.path
    if (root / name).exists():
        (root / name).rmdir()
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


def test_the_next_sweep_removes_boxes_of_dead_owners_only(box, base, image):
    program = (
        "import os, sys; from pathlib import Path; from slimx.extras.boxes.bubblewrap import BubblewrapBox\n"
        "BubblewrapBox(Path(sys.argv[1]), base=Path(sys.argv[2])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, image, base], check=True, timeout=300)
    assert len(list(base.glob(f"{rootfs.PREFIX}*"))) == 2
    assert rootfs.sweep(base) == 1
    assert box.run(["true"]).ok


def test_counting_stops_if_entries_are_added_faster_than_counted(tmp_path):
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert rootfs.used(tmp_path) == 100 * rootfs.ENTRY
    assert rootfs.used(tmp_path, most=10 * rootfs.ENTRY) == 11 * rootfs.ENTRY


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
def test_an_image_with_outside_members_or_too_large_is_refused_cleanly(base, tmp_path, member, code, about):
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

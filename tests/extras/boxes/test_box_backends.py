"""Promises that every back end of boxes keeps: files, limits, attacks, and ends.

Podman's are slow tests. A server's boxes are bubblewrap's, behind a protocol: what it adds is tried by `make test`, and
what bubblewrap does alone is tried of them by `make test-all`.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.bubblewrap import BubblewrapBox
from slimx.extras.boxes.containers import ContainerBox
from slimx.extras.boxes.engines import OWNER
from slimx.extras.boxes.programs.sandbox import Limits
from slimx.extras.boxes.protocol import Box
from slimx.extras.boxes.remote import RemoteBox, RemoteServer
from tests.extras.boxes import box_stand
from tests.extras.boxes.box_stand import SMALL, needed_engine, served
from tests.processes import wait_for
from tests.refusals import refused

KINDS = ["bubblewrap", "remote", pytest.param("container", marks=pytest.mark.slow("needs podman"))]

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit", "cp", "rm")

SLOW = [pytest.param(kind, marks=pytest.mark.slow("full grid of back ends")) for kind in ("remote", "container")]
of_bubblewrap = pytest.mark.parametrize("begin", ["bubblewrap", *SLOW], indirect=True)
"""Marks a test whose promise is kept by the same lines of code for a box that a server has."""


def made(kind: str, server: RemoteServer | None, base: Path) -> Callable[..., Box]:
    """Begins boxes of a kind."""

    def begin(source: str | Path, limits: Limits = SMALL) -> Box:
        if kind == "remote":
            assert server is not None
            return RemoteBox(source, limits, server=server)
        if kind == "container":
            return ContainerBox(source, limits, engine=needed_engine(), host_usr=True, base=base)
        return BubblewrapBox(Path(source), limits, host_usr=True, base=base)

    return begin


@pytest.fixture(scope="module", params=KINDS)
def begin(request):
    """Begins boxes of each kind; none of them, and nothing of them, is left when the tests have ended."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        base = Path(directory)
        if request.param == "remote":
            with served(base, "--memory-mib", "128", "--disk-mib", "8", "--seconds", "60") as (server, _):
                yield made("remote", server, base)
                state = server.request("GET", "").content
                assert b'"held": 0' in state, state
        else:
            yield made(request.param, None, base)
        if request.param == "container":
            engine = needed_engine()
            for listed in ("ps", "--all"), ("images",):
                assert engine.call(*listed, "--quiet", "--filter", f"label={OWNER}") == ""
        assert list(base.glob(f"{rootfs.PREFIX}*")) == [], "every box has ended"


@pytest.fixture
def image(tmp_path):
    return box_stand.image(tmp_path / "image.tar")


@pytest.fixture
def box(begin, image):
    made = begin(image)
    yield made
    made.end()


def python(box: Box, program: str, **options: object):
    return box.run(["python3", "-c", program], cwd="/work", **options)


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
    box.put("/work/bytes", bytes(range(256)) * 300)
    assert box.get("/work/bytes", 76_800) == bytes(range(256)) * 300


def test_a_box_begun_from_a_snapshot_has_its_files_and_changes_none_of_it(begin, box, tmp_path):
    box.put("/work/kept", b"before")
    box.snapshot(tmp_path / "snapshot")
    box.put("/work/kept", b"after")
    other = begin(tmp_path / "snapshot")
    try:
        assert other.get("/work/kept", 10) == b"before"
        other.put("/work/kept", b"other")
    finally:
        other.end()
    assert (tmp_path / "snapshot/work/kept").read_bytes() == b"before" and box.get("/work/kept", 10) == b"after"


# Ways out -----------------------------------------------------------------------------------------------------------


def test_only_plain_files_reached_without_links_are_read_and_written(box):
    made = "mkdir d; echo x > d/f; ln -s d way; ln -s /etc/passwd link; mkfifo fifo; chmod 777 d"
    assert box.run(["sh", "-c", made], cwd="/work").ok
    for path in ("/work/way/f", "/work/way/new/f", "/work/link", "/work/fifo", "/work/d"):
        with refused("box.file", about=path):
            box.get(path, 100)
        with refused("box.file", about=path):
            box.put(path, b"x")
    assert box.run(["ls", "/work/d"]).stdout == "f\n"


@pytest.mark.parametrize("path", ["relative", "/", "/a/../../etc/passwd", "/.."])
def test_a_path_that_is_none_of_a_file_is_refused(box, path):
    with refused("box.path", about=path):
        box.get(path, 100)


def test_a_file_larger_than_allowed_is_not_read(box):
    box.put("/work/large", bytes(101))
    with refused("box.large", about="/work/large"):
        box.get("/work/large", 100)


ATTACKS = """
import ctypes, json, os, platform
NET = "/sys/class/net"
libc, x86 = ctypes.CDLL(None, use_errno=True), platform.machine() == "x86_64"
def call(numbers, *arguments):
    return libc.syscall(numbers[0] if x86 else numbers[1], *arguments) >= 0
def wrote(path):
    try: open(path, "w").close()
    except OSError: return False
    return True
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "capabilities": int(status["CapEff"], 16) or int(status["CapBnd"], 16),
    "privileges": status["NoNewPrivs"].strip() != "1",
    "user name space": call((272, 97), 0x10000000),
    "mount name space": call((272, 97), 0x00020000),
    "mount": call((165, 40), b"none", b"/work", b"tmpfs", 0, None),
    "bpf": call((321, 280), 0, None, 0),
    "keys": call((250, 219), 0, -3, 0),
    "perf": call((298, 241), None, 0, -1, -1, 0),
    "reboot": call((169, 142), 0xfee1dead, 672274793, 0, None),
    "host's clock": call((227, 112), 0, None),
    "writes": [path for path in ("/usr/x", "/proc/sys/kernel/hostname", "/sys/x", "/proc/sysrq-trigger")
               if wrote(path)],
    "links": [each for each in (os.listdir(NET) if os.path.exists(NET) else []) if each != "lo"],
    "others": [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 1000],
    "disks": [each for each in os.listdir("/dev") if each.startswith(("vd", "sd", "nvme", "loop", "kvm", "mem"))],
}))
"""


def test_the_machine_outside_cannot_be_reached(box):
    ran = python(box, ATTACKS)
    found = {name: value for name, value in json.loads(ran.stdout).items() if value}
    assert found == {}, ran.stderr


# Limits -------------------------------------------------------------------------------------------------------------


def test_a_box_with_more_files_than_its_disk_holds_is_ended(box):
    ran = python(box, "import time\nfor n in range(4): open(f'{n}', 'wb').write(bytes(3 * 2**20))\ntime.sleep(300)")
    assert ran.ended == "disk"


@of_bubblewrap
@pytest.mark.parametrize(
    "program",
    [
        "for n in range(10**6): open(f'{n}', 'w').close()\ntime.sleep(300)",
        "held = [open(f'{n}', 'wb') for n in range(4)]\n"
        "for n, file in enumerate(held): os.unlink(f'{n}'); file.write(bytes(3 * 2**20)); file.flush()\n"
        "time.sleep(300)",
        "for n in range(3000): os.mkdir('d' * 9); os.chdir('d' * 9)\ntime.sleep(300)",
        "for n in range(4): open(f'{n}', 'wb').write(bytes(3 * 2**20))",
    ],
    ids=["entries", "deleted files", "deep directories", "files at the end"],
)
def test_a_box_that_fills_its_disk_is_ended_and_removed(box, program):
    ran = python(box, "import os, time\n" + program)
    assert ran.ended == "disk" and ran.seconds < SMALL.seconds


@of_bubblewrap
def test_a_file_alone_cannot_be_larger_than_the_disk(box):
    ran = python(box, "open('x', 'wb').truncate(9 * 2**20)")
    assert ran.ended == "exit" and ran.status != 0 and box.get("/work/x", 0) == b""


@of_bubblewrap
@pytest.mark.parametrize(
    ("program", "limits", "ended"),
    [
        ("import time; time.sleep(300)", Limits(seconds=5.0, memory_mib=128, disk_mib=8), "time"),
        ("while True: print('x' * 1000)", SMALL, "output"),
        ("import os, time\nfor _ in range(2): os.fork()\nb = bytearray(80 * 2**20)\ntime.sleep(300)", SMALL, "memory"),
    ],
    ids=["time", "output", "memory"],
)
def test_a_program_is_ended_at_its_limit_and_the_box_goes_on(begin, image, program, limits, ended):
    made = begin(image, limits)
    try:
        assert python(made, program).ended == ended
        assert made.run(["true"]).ok
    finally:
        made.end()


@of_bubblewrap
def test_processes_are_limited(box):
    program = (
        "import os\nn = 0\ntry:\n  while n < 500:\n    if os.fork() == 0: os.read(0, 1); os._exit(0)\n    n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    ran = python(box, program)
    assert 0 < int(ran.stdout.split()[0]) < 40, ran


def test_background_processes_of_a_program_end_with_it(box):
    left = "(while sleep 0.05; do echo x >> count; done) > /dev/null 2>&1 & until [ -s count ]; do sleep 0.05; done"
    assert box.run(["sh", "-c", left], cwd="/work").ok
    counted = box.get("/work/count", 10**6)
    time.sleep(0.5)
    assert counted and box.get("/work/count", 10**6) == counted


def test_a_command_that_is_not_there_has_failed_by_itself(box):
    ran = box.run(["no-such-program"])
    assert ran.ended == "exit" and ran.status in (126, 127)
    assert box.run(["true"], cwd="/none").status in (126, 127)
    assert box.run(["sh", "-c", "exit 125"]).status == 125, "a container engine's own status"


def test_ending_a_box_ends_what_runs_in_it(box):
    ended, program = [], f"import time; time.sleep(300)  # of {os.getpid()}"
    thread = threading.Thread(target=lambda: ended.append(python(box, program).ended))
    thread.start()
    wait_for(lambda: box_stand.runs(program))
    box.end()
    thread.join(120)
    assert ended == ["stop"]
    with refused("box.ended", about="box"):
        box.run(["true"])


def test_a_program_is_ended_when_it_is_closing(box):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    assert python(box, "import time; time.sleep(300)", stop=stop).ended == "stop"
    assert box.run(["true"]).ok


@pytest.mark.parametrize(("content", "code"), [(None, "box.source"), (b"no archive", "box.image")])
def test_an_image_that_is_not_there_or_no_archive_is_refused(begin, tmp_path, content, code):
    path = tmp_path / "bad.tar"
    if content is not None:
        path.write_bytes(content)
    with refused(code):
        begin(path)

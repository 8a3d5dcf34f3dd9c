"""Attacks of a program inside the sandbox beyond its name spaces: memory that no process has, forged failures, calls
that the kernel should not take from it, and the threads that everybody shares."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slimx.errors import SlimxError
from slimx.extras.boxes.programs import enclosure, memory_group, sandbox, seccomp
from slimx.extras.boxes.programs.memory_group import Hierarchy
from slimx.extras.boxes.programs.sandbox import Limits, Sandbox
from tests.extras.boxes.sandbox_stand import Marked

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit")

SMALL = Limits(seconds=60.0, memory_mib=128, processes=8, disk_mib=8)
CALL = """
import ctypes, errno, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def call(numbers, *arguments):
    result = libc.syscall(numbers[0] if x86 else numbers[1], *arguments)
    print("worked" if result >= 0 else errno.errorcode[ctypes.get_errno()])
"""


def run(program: str, limits: Limits = SMALL) -> sandbox.ProgramResult:
    return Sandbox(limits).run_blocking(program)


# Memory outside every address space -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.memfd_create('x')",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 2**20, 0o1600) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).semget(0, 1, 0o1600) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).mq_open(b'/x', 0o102, 0o600, None) >= 0",
    ],
    ids=["memfd", "shared segment", "message queue", "semaphores", "POSIX queue"],
)
def test_memory_outside_of_address_spaces_cannot_be_had(program):
    ran = run(program)
    assert ran.ended == "exit" and ran.status == 1
    assert "PermissionError" in ran.stderr or "AssertionError" in ran.stderr


HIDING = """
import mmap, os, time
for child in range(3):
    if os.fork() == 0: break
size = 96 * 2**20
memory = mmap.mmap(-1, size)
for at in range(0, size, 4096): memory[at] = 1
memory.madvise(mmap.MADV_DONTNEED)   # out of this process's resident set, and still kept
time.sleep(300)
"""


@pytest.mark.skipif(memory_group.find() is None, reason="needs a memory control group that this process may divide")
def test_the_control_group_bounds_memory_without_resident_pages():
    """Four processes within their own limits keep 384 MiB at a limit of 128 MiB + 8 MiB."""
    ran = run(HIDING)
    assert ran.ended == "memory" and ran.seconds < SMALL.seconds


@pytest.mark.skipif(memory_group.find() is None, reason="needs a memory control group that this process may divide")
def test_no_control_group_is_left_behind():
    place = memory_group.find()
    run("print(1)")
    mine = [group for group in place.directory.glob(f"{memory_group.PREFIX}{os.getpid()}-*")]
    assert mine == []


@pytest.mark.skipif(memory_group.find() is None, reason="needs a memory control group that this process may divide")
def test_a_group_that_a_killed_process_left_is_removed_by_the_next_one():
    place = memory_group.find()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = place.directory / f"{memory_group.PREFIX}{gone.pid}-0"
    left.mkdir()
    assert memory_group.find() == place and not left.exists()


@pytest.fixture
def system(tmp_path):
    """A /proc/self and control groups of version 2, as files: this machine's own may be version 1."""

    def make(group: str, controls: dict[str, str]) -> Path:
        for directory, handed_on in controls.items():
            path = tmp_path / "cgroup" / directory
            path.mkdir(parents=True, exist_ok=True)
            (path / "cgroup.subtree_control").write_text(handed_on)
            (path / "cgroup.procs").touch()
        proc = tmp_path / "self"
        proc.mkdir()
        (proc / "cgroup").write_text(f"0::/{group}\n")
        (proc / "mountinfo").write_text(f"30 25 0:26 / {tmp_path}/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")
        return proc

    return make


@pytest.mark.parametrize(
    ("group", "controls", "directory"),
    [
        ("", {"": "cpu memory"}, ""),
        ("user/app", {"": "memory", "user": "memory pids", "user/app": "memory"}, "user/app"),
        ("user/app", {"": "memory", "user": "memory pids", "user/app": ""}, "user"),
        ("user/app", {"": "memory", "user": "pids", "user/app": ""}, None),
    ],
)
def test_groups_of_version_2_are_made_where_memory_is_handed_on(
    group, controls, directory, system, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory_group, "_delegated", lambda directory: True)
    found = memory_group._hierarchies(system(group, controls))
    assert found[:1] == ([] if directory is None else [Hierarchy(tmp_path / "cgroup" / directory, 2)])


def test_only_delegated_control_groups_of_root_are_divided(system, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getxattr", lambda path, name: (_ for _ in ()).throw(OSError()))
    assert memory_group._hierarchies(system("unit", {"": "memory", "unit": ""})) == []


def test_without_control_groups_programs_run_with_another_memory_bound(monkeypatch):
    with_group = Sandbox(SMALL)
    monkeypatch.setattr(enclosure, "_hierarchy", lambda: None)
    without = Sandbox(SMALL)
    assert without.memory_bound != with_group.memory_bound or memory_group.find() is None
    assert without.run_blocking("print(1)").ok
    taken = "import os, time\nfor _ in range(2): os.fork()\nb = bytearray(80 * 2**20)\ntime.sleep(300)"
    assert without.run_blocking(taken).ended == "memory"


# Failures that are the program's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["bwrap: x", "unshare: x", "prlimit: x", '{ "exit-code": 0 }'])
def test_a_program_that_speaks_like_the_sandbox_has_failed_by_itself(first):
    ran = run(f"import sys\nprint('''{first}''', file=sys.stderr)\nsys.exit(1)")
    assert (ran.ended, ran.status, ran.stderr) == ("exit", 1, first + "\n")


def test_the_status_of_a_run_cannot_be_written_from_inside():
    forged = (
        "import glob, os, sys\n"
        "for path in glob.glob('/proc/[0-9]*/fd/*'):\n"
        "    for write in (lambda: os.open(path, os.O_WRONLY), lambda: int(path.rpartition('/')[2])):\n"
        "        try: os.write(write(), b'{ \"exit-code\": 0 }\\n')\n"
        "        except OSError: pass\n"
        "sys.exit(7)"
    )
    assert run(forged).status == 7


# Calls that are denied ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("call((272, 97), 0x10000000)", "EPERM"),
        ("call((56, 220), 0x10000000 | 17, 0, 0, 0, 0)", "EPERM"),
        ("call((435, 435), 0, 0)", "ENOSYS"),
        ("call((165, 40), b'none', b'/tmp', b'tmpfs', 0, 0)", "EPERM"),
        ("call((430, 430), b'tmpfs', 0)", "EPERM"),
        ("call((101, 117), 0, 0, 0, 0)", "EPERM"),
        ("call((321, 280), 0, 0, 0)", "EPERM"),
        ("call((250, 219), 0, -3, 0, 0, 0)", "EPERM"),
        ("call((323, 282), 1)", "EPERM"),
        ("call((298, 241), 0, 0, -1, -1, 0)", "EPERM"),
        ("call((425, 425), 8, 0)", "EPERM"),
        ("call((310, 270), 1, 0, 0, 0, 0, 0)", "EPERM"),
        ("call((41, 198), 40, 1, 0)", "EAFNOSUPPORT"),
        ("call((41, 198), 38, 5, 0)", "EAFNOSUPPORT"),
        ("call((41, 198), 16, 3, 0)", "EAFNOSUPPORT"),
        ("call((41, 198), 1, 1, 0)", "worked"),
        ("call((41, 198), 2, 1, 0)", "worked"),
        ("call((39, 172))", "worked"),
    ],
    ids=[
        "user name space", "clone into one", "clone3", "mount", "fsopen", "ptrace", "bpf", "keyctl", "userfaultfd",
        "perf", "io_uring", "process_vm_readv", "vsock", "alg", "netlink", "unix", "inet", "getpid",
    ],
)  # fmt: skip
def test_a_call_that_leads_out_is_denied_and_the_others_work(program, output):
    ran = run(CALL + program)
    assert ran.stdout == output + "\n", ran.stderr


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the other call numbers are x86-64's")
def test_calls_under_another_abis_numbers_end_the_program():
    assert run(CALL + "call((0x40000000 + 39, 0))").status == 128 + 31, "SIGSYS"


def test_name_spaces_cannot_be_nested_even_without_the_filter(monkeypatch):
    """bubblewrap itself shuts them off where it can; a filter that allows all calls shows that."""
    if not enclosure._can_disable_userns("/usr/bin/bwrap"):
        pytest.skip("this bubblewrap has no --disable-userns")
    monkeypatch.setattr(seccomp, "program", lambda: seccomp._step(seccomp._RETURN, seccomp._ALLOW))
    assert run(CALL + "call((272, 97), 0x10000000)").stdout == "ENOSPC\n"


def test_a_machine_whose_calls_are_unknown_is_refused(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    with pytest.raises(SlimxError) as refused:
        Sandbox()
    assert (refused.value.code, refused.value.about) == ("sandbox.machine", "riscv64")


# Threads ------------------------------------------------------------------------------------------------------------


def test_a_program_stopped_during_its_start_leaves_no_process():
    """The run is given up at every moment of the start: while unshare, bubblewrap, its child, or the program has just
    begun."""
    box = Marked(SMALL)
    for number in range(40):
        stop = threading.Event()
        timer = threading.Timer(number * 0.004, stop.set)
        timer.start()
        box.run_blocking("import time; time.sleep(300)", stop=stop)
        timer.join()
        assert box.processes() == []


async def test_slow_programs_leave_the_shared_threads_alone():
    box = Sandbox(Limits(seconds=1200.0))
    runs = [asyncio.create_task(box.run("import time; time.sleep(1000)")) for _ in range(24)]
    await asyncio.sleep(0.5)
    began = time.monotonic()
    assert await asyncio.to_thread(lambda: 1) == 1
    waited = time.monotonic() - began
    for task in runs:
        task.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    assert (await box.run("print(1)")).ok, "the threads are free again long before the programs' own limit"
    assert waited < 300 and time.monotonic() - began < 900

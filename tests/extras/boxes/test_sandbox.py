"""Programs of a model cannot harm the machine: each way out is tried, and each missing guarantee is named."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slimx.errors import SlimxError
from slimx.extras.boxes.programs import enclosure
from slimx.extras.boxes.programs.sandbox import Limits, ProgramResult, Sandbox
from slimx.extras.boxes.rewards import code
from tests.extras.boxes.sandbox_stand import Marked
from tests.extras.rewards.reward_stand import context, trajectory
from tests.refusals import refused

pytestmark = pytest.mark.needs("bwrap", "unshare", "prlimit")

QUICK = Limits(seconds=2.0, memory_mib=256, processes=4, disk_mib=4, output_kib=4)
PATIENT = replace(QUICK, seconds=120.0)
"""For programs that are to end in another way, on a loaded machine too."""


def run(program: str, **options: object) -> ProgramResult:
    return Sandbox(PATIENT).run_blocking(program, **options)


def test_a_program_reads_its_input_and_its_files_and_prints():
    ran = run(
        "import helper, sys\nprint(helper.double(input()))\nprint('oh', file=sys.stderr)\nsys.exit(3)",
        stdin="ab\n",
        files={"helper.py": "def double(x): return 2 * x"},
    )
    assert (ran.stdout, ran.stderr, ran.ended, ran.status, ran.ok) == ("abab\n", "oh\n", "exit", 3, False)
    assert run("print('x')").ok


def test_a_large_input_reaches_a_program_that_is_slow_to_read():
    ran = run("import sys, time; time.sleep(0.3); print(len(sys.stdin.read()))", stdin="x" * 1_000_000)
    assert ran.stdout == "1000000\n"
    assert run("import sys; sys.stdin.close(); print('done')", stdin="x" * 1_000_000).stdout == "done\n"


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(1000)", "time"),
        ("import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass", "time"),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "time"),
        ("while True: print('x' * 1000)", "output"),
        (
            "import os, time\nfor _ in range(2): os.fork()\nb = bytearray(150 * 2**20)\ntime.sleep(100)",
            "memory",
        ),
    ],
    ids=["loop", "sleep", "loop without streams", "fork bomb", "flood", "memory of all"],
)
def test_an_endless_program_is_killed_with_all_its_processes(program, ended):
    limits = replace(QUICK, seconds=0.5) if ended == "time" else PATIENT
    box = Marked(limits)
    ran = box.run_blocking(program)
    assert ran.ended == ended and ran.status is None and ran.seconds < limits.seconds + 200
    assert len(ran.stdout) <= 4096
    assert box.processes() == []


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("bytearray(10 * 10**9)", "MemoryError"),
        ("import os\nfor _ in range(50): os.fork() or __import__('time').sleep(60)", "BlockingIOError"),
        (
            "from threading import Thread\nfrom time import sleep\n"
            "for _ in range(50): Thread(target=sleep, args=(60,), daemon=True).start()",
            "can't start new thread",
        ),
        ("open('/tmp/x', 'wb').write(b'x' * 10**7)", "File too large"),
        ("for n in range(9): open(f'/tmp/{n}', 'wb').write(b'x' * 10**6)", "No space left"),
        ("for n in range(9): open(f'/dev/shm/{n}', 'wb').write(b'x' * 10**6)", "No space left"),
        ("open('/etc/passwd')", "No such file"),
        ("open('/usr/x', 'w')", "Read-only file system"),
        ("import os; os.setuid(0)", "Invalid argument"),
        ("import os; os.kill(PID, 9)", "ProcessLookupError"),
        ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "Connection refused"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "unreachable"),
        ("import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0", "AssertionError"),
    ],
)
def test_an_attempt_to_break_out_fails(program, error):
    class Answer(BaseHTTPRequestHandler):
        pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        ran = run(program.replace("PID", str(os.getpid())).replace("PORT", str(server.server_port)))
        server.socket.close()
    assert ran.ended == "exit" and ran.status != 0
    assert error in ran.stderr


def test_concurrent_sandboxes_have_separate_limits():
    bomb = (
        "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(60); os._exit(0)\n    n += 1\n"
    )

    async def several() -> list[str]:
        sandbox = Sandbox(PATIENT)
        return [
            ran.stdout for ran in await asyncio.gather(*(sandbox.run(bomb + "except OSError: print(n)") for _ in "123"))
        ]

    counts = asyncio.run(several())
    assert len(set(counts)) == 1 and int(counts[0]) >= QUICK.processes


def test_the_environment_and_descriptors_of_the_run_stay_outside(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    ran = run("import os; print(dict(os.environ), sorted(os.listdir('/proc/self/fd')))")
    assert "secret" not in ran.stdout and "'3'" in ran.stdout and "'5'" not in ran.stdout


# The check before a run -----------------------------------------------------------------------------------------------


def test_the_guarantees_hold_here():
    Sandbox(PATIENT).check()


def without(*words: str) -> type[Sandbox]:
    """Returns a sandbox whose programs lack some words."""

    class Open(enclosure.Enclosure):
        def _limited(self) -> list[str]:
            return [word for word in super()._limited() if not word.startswith(words)]

        def _enclosed(self) -> list[str]:
            line = super()._enclosed()
            shared = {"net", "pid"} & set(words)
            if shared:
                kept = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts") if name not in shared]
                at = line.index("--unshare-all")
                line[at : at + 1] = kept
            return line

    class Broken(Sandbox):
        def __init__(self, limits: Limits) -> None:
            super().__init__(limits)
            self._enclosure = Open(limits, "python3")

        def _enclosed(self, named: dict[str, int]) -> list[str]:
            line = super()._enclosed(named)
            if "read-only" in words:
                for _ in range(2):
                    at = line.index("--remount-ro")
                    del line[at : at + 2]
            if "etc" in words:
                line[:0] = ["--ro-bind", "/etc", "/etc"]
            return line

    return Broken


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("--nproc",), "the number of processes is limited"),
        (("net",), "there is no network"),
        (("pid",), "other processes are out of sight"),
        (("read-only",), "files outside cannot be written"),
        (("etc",), "files outside cannot be read"),
    ],
)
def test_a_guarantee_that_is_missing_is_named(missing, message):
    with pytest.raises(SlimxError) as refused:
        without(*missing)(Limits(memory_mib=256, seconds=60.0)).check()
    assert refused.value.code == "sandbox.promise" and message in str(refused.value)


def test_a_trial_has_a_minute_and_not_that_of_a_program():
    Sandbox(replace(QUICK, seconds=0.001)).check()


def test_memory_is_guarded_twice():
    """Without a limit of the address space, the look at all processes together ends the probe."""
    with pytest.raises(SlimxError) as refused:
        without("--as")(Limits(memory_mib=256, seconds=60.0)).check()
    assert (refused.value.code, refused.value.about) in {
        ("sandbox.probe", "memory"),
        ("sandbox.promise", "memory is limited"),
    }


def test_a_machine_without_bubblewrap_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(enclosure.shutil, "which", lambda program, path: None if program == "bwrap" else program)
    with pytest.raises(SlimxError) as refused:
        Sandbox()
    assert (refused.value.code, refused.value.about) == ("sandbox.program", "bwrap")


def test_a_sandbox_that_cannot_start_is_no_result_of_the_program(monkeypatch):
    broken = Sandbox(QUICK)
    monkeypatch.setattr(broken.__class__, "_enclosed", lambda self, named: ["--no-such-option"])
    with pytest.raises(SlimxError, match="Unknown option") as refused:
        broken.run_blocking("print(1)")
    assert refused.value.code == "sandbox.start"


# The reward -----------------------------------------------------------------------------------------------------------

ADD = """Adds.
```python
def add(a, b): return a + b
if __name__ == "__main__":
    print(add(*map(int, input().split())))
```"""
PAIRS = [{"input": "2 3\n", "output": "5"}, {"input": "1 1\n", "output": " 2 \n"}]


def worth(text: str, tests: object, **options: object) -> float:
    return asyncio.run(
        code.reward(context(text, tests=tests), trajectory(), seconds=options.pop("seconds", 120.0), **options)
    )


@pytest.mark.parametrize(
    ("text", "tests", "value"),
    [
        (ADD, PAIRS, 1.0),
        (ADD, [*PAIRS, {"input": "1 1\n", "output": "3"}], 0.0),
        (ADD, ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"], 1.0),
        (ADD, ["assert add(2, 3) == 6"], 0.0),
        (ADD.replace("return a + b", "__import__('os')._exit(0)"), ["assert add(2, 3) == 6"], 0.0),
        ("```\nraise SystemExit(0)\n```", ["assert False"], 0.0),
        ("```python\nwhile True: pass\n```", PAIRS, 0.0),
        ("print(5)", PAIRS, 0.0),
        (f"```python\nprint(1)\n```\nNo, rather:\n{ADD}", PAIRS, 1.0),
    ],
)
def test_a_program_is_worth_the_tests_that_it_passes(text, tests, value):
    assert worth(text, tests, seconds=0.5 if "while True" in text else 120.0) == value


def test_a_share_of_the_tests_may_count():
    assert worth(ADD, [*PAIRS, {"input": "1 1\n", "output": "3"}], all_or_nothing=False) == pytest.approx(2 / 3)


@pytest.mark.parametrize("tests", [None, [], [{"input": "2"}], [3]])
def test_a_prompt_without_tests_is_refused(tests):
    with pytest.raises(SlimxError) as refused:
        worth(ADD, tests)
    assert (refused.value.code, refused.value.about) == ("reward.tests", "p7")


def test_a_run_does_not_start_if_the_sandbox_does_not_hold(monkeypatch):
    from tests.extras.rewards.reward_stand import hooks_of

    hooks_of(function="code", options={"seconds": 3.0})
    monkeypatch.setattr(
        Sandbox, "check", lambda self: (_ for _ in ()).throw(SlimxError("does not hold", code="sandbox.promise"))
    )
    with refused("sandbox.promise"):
        hooks_of(parts=[{"name": "c", "function": "code"}])

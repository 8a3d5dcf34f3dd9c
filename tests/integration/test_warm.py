"""Programs that are forked by `tests.warm` behave as programs that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import stacks
from tests.processes import lives, wait_for
from tests.warm.client import connected
from tests.warm.interpreter import MARK, interpreter, programs

pytestmark = pytest.mark.integration

PROGRAM = """
import json, os, sys, time
file = os.fstat(int(sys.argv[1])).st_ino
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("SLIMX_WARM"), os.getppid(), file]), flush=True)
if sys.argv[2] == "sleep":
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


@contextmanager
def sleeping(program: Path, mark: str, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """Yields the client of a program that sleeps, and the program; `mark`: its `MARK`."""
    command = [interpreter(), program, "0", "sleep"]
    environment = os.environ | {MARK: mark} | variables
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout.readline()
            wait_for(lambda: programs(mark))  # which the zygote lists while the program begins
            (forked,) = programs(mark)
            yield client, forked
        finally:
            client.kill()


def test_a_program_has_the_environment_and_parent_of_its_start(program: Path) -> None:
    with program.open() as file:
        process = subprocess.Popen(
            [interpreter(), "-u", program, str(file.fileno()), "3"],
            cwd=program.parent,
            env=os.environ | {"SLIMX_WARM": "yes"},
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        )
        output, _ = process.communicate(timeout=300)
        expected = [[str(file.fileno()), "3"], str(program.parent), "yes", os.getpid(), os.fstat(file.fileno()).st_ino]
    assert json.loads(output) == expected and process.returncode == 3


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name)
def test_a_signal_ends_the_program_and_its_client(program: Path, signum: signal.Signals) -> None:
    mark = f"{signum}-{os.getpid()}"
    with sleeping(program, mark) as (client, forked):
        client.send_signal(signum)
        assert client.wait(300) == -signum
        wait_for(lambda: not lives(forked) and not programs(mark))


def test_a_killed_client_ends_no_other_program(program: Path) -> None:
    mark = f"killed-{os.getpid()}"
    with sleeping(program, mark) as (client, forked):
        with connected(str(interpreter().parent / "driver")):  # the zygote waits for its request, then sees both ends
            forked.kill()
            wait_for(lambda: not lives(forked))
            client.kill()
            client.wait(300)
        wait_for(lambda: not programs(mark))
    assert subprocess.run([interpreter(), program, "0", "3"], stdout=subprocess.DEVNULL, timeout=300).returncode == 3


def test_a_program_writes_its_stacks_into_the_directory_of_its_session(program: Path, tmp_path: Path) -> None:
    """Another worker of the tests may have started the zygote."""
    folder = tmp_path / "stacks"
    folder.mkdir()
    with sleeping(program, f"stacks-{os.getpid()}", **{stacks.FOLDER: str(folder)}) as (_, forked):
        forked.send_signal(stacks.ASK)
        wait_for((folder / str(forked.pid)).read_text)
        assert "program.py" in (folder / str(forked.pid)).read_text()


def test_an_interpreter_starts_without_a_zygote(tmp_path: Path) -> None:
    code = "import sys; print(sys.executable)"
    done = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert Path(done.stdout.strip()).resolve() == Path(sys.executable).resolve()


FORKED = """
import multiprocessing, sys

def has_torch():
    return "torch" in sys.modules

if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print(pool.apply(has_torch))
"""


def test_a_server_of_forks_is_forked_with_its_imports(tmp_path: Path) -> None:
    program = tmp_path / "forked.py"
    program.write_text(FORKED)
    done = subprocess.run([interpreter(), program], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)

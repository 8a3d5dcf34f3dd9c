"""Programs of the repository in forks of one process, which has imported what they share.

    python -m tests.forked MODULE ... < RUNS

MODULEs are imported first. RUNS is a JSON list of `Run`s as mappings; a line, [exit status, output], answers each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from typer.core import TyperCommand

from slimx.runtime.process import end_with_parent

ROOT = Path(__file__).parents[1]
DEADLINE_S = 300
"""Seconds for one program, for hangs: it ends by SIGALRM."""


@dataclass(frozen=True)
class Run:
    """A program of the repository with its arguments."""

    words: Sequence[str]
    """["-m", MODULE, ...], or [FILE, ...] relative to the repository."""
    parse_only: bool = False
    """Ends with status 0 once the options are parsed."""

    def program(self) -> None:
        """Become the program."""
        if self.parse_only:
            for name in ("parse_args", "parse_intermixed_args"):
                setattr(argparse.ArgumentParser, name, _ending(getattr(argparse.ArgumentParser, name)))
        TyperCommand.invoke = _ending(lambda *_: None)
        words = self.words if self.words[0] == "-m" else [str(ROOT / self.words[0]), *self.words[1:]]
        execute(words)


def run_all(runs: Sequence[Run], directory: Path, modules: Sequence[str] = ("torch",)) -> list[tuple[int, str]]:
    """Exit status and output of each program, run in `directory` without a GPU. `modules`: imported once for all."""
    command = [sys.executable, "-m", "tests.forked", *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=directory, env=environment, input=json.dumps([asdict(run) for run in runs]),
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(status, output) for status, output in found]


def execute(words: Sequence[str]) -> None:
    """Execute ["-m", MODULE, ...], ["-c", TEXT, ...] or [FILE, ...] in this process, as the module `__main__`."""
    # Multiprocessing has the second name for what its children call so.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module = ModuleType("__main__")
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{words[1]}.__main__")
        module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
        sys.argv, code = [spec.origin, *words[2:]], spec.loader.get_code(spec.name)
    elif words[0] == "-c":
        sys.argv, code = ["-c", *words[2:]], compile(words[1], "-c", "exec")
    else:
        module.__file__ = words[0]
        sys.argv, code = list(words), compile(Path(words[0]).read_bytes(), words[0], "exec")
        sys.path.insert(0, os.path.dirname(words[0]))
    exec(code, vars(module))


def run_and_end(program: Callable[[], object]) -> NoReturn:
    """Run `program` in this process, and end with the exit status that Python would give it."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _ending(parse: Callable[..., object]) -> Callable[..., NoReturn]:
    def parse_and_end(*arguments: object, **named: object) -> NoReturn:
        parse(*arguments, **named)
        raise SystemExit(0)

    return parse_and_end


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads may hang: import less"
    parent = os.getpid()
    for run in [Run(**each) for each in json.load(sys.stdin)]:
        sys.stdout.flush()
        with tempfile.TemporaryFile() as output:
            if not (child := os.fork()):
                end_with_parent(parent, signal.SIGKILL)
                os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
                signal.alarm(DEADLINE_S)
                run_and_end(run.program)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([status, output.read().decode(errors="replace")]))


if __name__ == "__main__":
    main()

"""Shows where the time of the tests goes: `python tools/suite.py [--json FILE] [-- ARGUMENTS OF PYTEST]`.

Runs pytest once, all tests on two workers without arguments, and looks at the CPU time of all of its processes. Prints
CPU and wall seconds by directory, file and fixture, and CPU seconds by role of the process, with the part that imports
and collection take.

CPU seconds of a process count for the test that its pytest process ran at that moment, and there for the fixture that
was being set up; those of a process that lost its parent before it was seen, for the test that it was started in.
Imports are estimated: starts of a role times the CPU seconds of its imports, measured at the end.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.rings.parts import FOLDERS  # noqa: E402
from tools.timing.samples import PERIOD, Process, Samples  # noqa: E402 (a script finds the project by the line above)

ROLES = {
    "Ray": ("gcs_server", "raylet", "ray/_private", "ray/dashboard", "ray-dashboard", "runtime_env"),
    "router": ("sglang_router", "sgl-router", "engines.server.guard"),
    "server": ("sglang", "slimx.engines.server", "stock_server", "engine_oracle"),
    "Ray worker": ("ray::",),
    "rank": ("_rank", "rank_", "ranks", "oracle"),
    "driver": ("slimx.cli", "slimx train", "bin/slimx", "slimx.commands", "orchestration", "tests.warm"),
    "browser": ("chromium", "chrome"),
    "compiler": ("nvcc", "g++", "cc1plus", "cicc", "ptxas", "ruff", "mypy"),
    "pytest": ("pytest", "import sys;exec(eval(sys.stdin.readline()))"),
}
"""Roles of processes, by parts of their command lines; the first that fits."""
IMPORTS = {
    "server": "from slimx.extras.cpu.adapters import absent; absent.install(); import sglang.srt.managers.scheduler",
    "Ray worker": "import ray, torch, slimx.trainer.worker",
    "rank": "import torch, megatron.core, slimx.trainer.worker",
    "driver": "import ray, slimx.orchestration.run",
    "pytest": "import pytest, torch",
}
"""Imports of a role, whose CPU seconds are measured alone."""


@dataclass(slots=True)
class Share:
    cpu: float = 0.0
    wall: float = 0.0
    tests: int = 0


class Timeline:
    """Spans of one pytest process, by time."""

    def __init__(self, events: list[dict[str, Any]]):
        self._spans = sorted((e["began"], e["ended"], e["phase"], e["name"], e["test"]) for e in events)
        self._begins = [span[0] for span in self._spans]

    def at(self, moment: float) -> tuple[str, str]:
        """Returns the test, or file that was collected, and the innermost fixture: ("", "") between them."""
        test = fixture = ""
        for began, ended, phase, name, of in self._spans[max(0, self._first(moment)) : self._after(moment)]:
            if began <= moment <= ended:
                test = of if phase != "collect" else f"{of}::collection"
                fixture = name if phase == "fixture" else fixture
        return test, fixture

    def _after(self, moment: float) -> int:
        return bisect.bisect_right(self._begins, moment)

    def _first(self, moment: float) -> int:
        return self._after(moment) - 200  # nested spans are far fewer


def role_of(command: str) -> str:
    return next((role for role, parts in ROLES.items() if any(part in command for part in parts)), "other")


def run(arguments: list[str], events: Path) -> tuple[int, Samples]:
    """Runs pytest, and looks at its processes until it has ended; returns its exit status too."""
    samples = Samples()
    command = [sys.executable, "-m", "pytest", "-p", "tools.timing.events", f"--events={events}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None:
        samples.look(process.pid)
        time.sleep(PERIOD)
    return process.returncode, samples


def read_events(directory: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        int(file.stem): [json.loads(line) for line in file.read_text().splitlines()] for file in directory.iterdir()
    }


def shares(processes: list[Process], events: dict[int, list[dict[str, Any]]]) -> dict[str, dict[str, Share]]:
    """Returns CPU and wall seconds by table (directory, file, fixture, role) and row."""
    tables: dict[str, dict[str, Share]] = {
        name: defaultdict(Share) for name in ("directory", "file", "test", "fixture", "role")
    }
    timelines = {pid: Timeline(found) for pid, found in events.items()}
    for process in processes:
        role = tables["role"][role_of(process.command)]
        role.cpu += process.seconds
        role.tests += 1
        for moment, seconds in process.parts:
            timeline = timelines.get(process.worker)
            test, fixture = timeline.at(moment) if timeline else (process.test, "")
            for table, row in _rows(test, fixture):
                tables[table][row].cpu += seconds
    for found in events.values():
        for event in found:
            wall = event["ended"] - event["began"]
            if event["phase"] == "fixture":
                share = tables["fixture"][event["name"]]
                share.wall, share.tests = share.wall + wall, share.tests + 1
            elif event["phase"] == "test":
                for table, row in _rows(event["test"], ""):
                    share = tables[table][row]
                    share.wall, share.tests = share.wall + wall, share.tests + 1
            elif event["phase"] == "collect":
                tables["file"]["collection"].wall += wall
    return tables


def _rows(test: str, fixture: str) -> list[tuple[str, str]]:
    file, _, name = test.partition("::")
    if name == "collection" or not test:
        return [("file", "collection" if test else "outside of tests")]
    rows = [("directory", str(Path(file).parent)), ("file", file), ("test", test)]
    return [*rows, ("fixture", fixture)] if fixture else rows


def import_seconds(statements: dict[str, str]) -> dict[str, float]:
    """Returns the CPU seconds of each role's imports, in a process of its own; without a role whose imports fail."""
    found = {}
    for role, statement in statements.items():
        before = os.times()
        done = subprocess.run([sys.executable, "-c", statement], capture_output=True, cwd=ROOT)
        after = os.times()
        if done.returncode == 0:
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            found[role] = round(spent, 2)
    return found


def print_table(name: str, rows: dict[str, Share], most: int) -> None:
    print(f"\n{name:72}{'CPU s':>9}{'wall s':>9}{'number':>8}")
    ordered = sorted(rows.items(), key=lambda row: -(row[1].cpu or row[1].wall))
    for row, share in ordered[:most]:
        print(f"{row[-72:]:72}{share.cpu:9.1f}{share.wall:9.1f}{share.tests:8}")
    if len(ordered) > most:
        print(f"{f'and {len(ordered) - most} more':72}{sum(share.cpu for _, share in ordered[most:]):9.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the tables")
    parser.add_argument("--rows", type=int, default=30, help="rows of a table that are printed")
    parser.add_argument("--no-imports", action="store_true", help="do not measure imports")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of pytest; its options after --")
    options = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as directory:
        status, samples = run(
            options.arguments or ["--numprocesses=2", "--dist=loadfile", *FOLDERS],
            Path(directory),
        )
        events = read_events(Path(directory))
    wall = time.time() - began
    tables = shares(list(samples.processes.values()), events)
    imports = import_seconds({} if options.no_imports else IMPORTS)
    for name, rows in tables.items():
        print_table(name, rows, options.rows)
    print(f"\n{'imports, estimated':72}{'CPU s':>9}{'each':>9}{'starts':>8}")
    starts = Counter(role_of(process.command) for process in samples.processes.values() if process.seconds > 1)
    for role, seconds in imports.items():
        print(f"{role:72}{seconds * starts[role]:9.1f}{seconds:9.1f}{starts[role]:8}")
    cpu = sum(process.seconds for process in samples.processes.values())
    print(f"\nCPU seconds {cpu:.0f}, wall seconds {wall:.0f}, exit status {status}")
    if options.json:
        written = {name: {row: [s.cpu, s.wall, s.tests] for row, s in rows.items()} for name, rows in tables.items()}
        options.json.write_text(json.dumps(written | {"imports": imports, "starts": starts, "cpu": cpu, "wall": wall}))
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Runs whose machine gives out: a full disk, no file descriptors left, a clock that is set while they go on.

They run in `make test-all`; docs/operations.md has the outcomes in a table.
"""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimx.observability.live.activity import read_activity
from tests.full_disk import fill, small_disk
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config, written
from tests.integration.victims import command_of

pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run for each failure"), pytest.mark.timeout(3600)]

HOURS = 7200
"""Seconds by which a clock is set."""
MORE = 3
"""Steps after a fault that show that the run goes on."""
LONG = 40
"""Steps for which a process that lacks something may still have had enough."""


def config_of(directory: Path, model: Path, task: Path, **sections: dict[str, Any]) -> Path:
    """Returns a run of one trainer rank that saves every other step."""
    values = {"trainer": {"world_size": 1, "expert": 1}, "schedule": {"steps": 400}, "checkpoint": {"every": 2}}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return write_config(directory, model, task / "train.jsonl", **values)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", kib=96 * 1024) as mounted:
        yield mounted


@pytest.mark.parametrize("left_kib", [0, 256], ids=["full", "a checkpoint does not fit"])
def test_a_run_with_a_full_disk_ends_and_continues_when_space_is_freed(
    left_kib: int, tiny_model: Path, task_of_sums: Path, disk: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, tiny_model, task_of_sums, run={"dir": str(disk / "run")})
    run = TrainProcess(config, cold=True)
    run.until(lambda: completed_steps(disk / "run") >= 3)
    newest = max((disk / "run" / "checkpoints").glob("iter_*"))
    fill(disk, left_kib)
    status = run.wait()
    output = run.text()
    print(f"ended with status {status}: {output[-2000:]}")
    run.assert_nothing_left()
    assert status == 2 and "Traceback" not in output
    assert newest in (disk / "run" / "checkpoints").glob("iter_*"), "the one before stays"
    assert not left_kib or completed_steps(disk / "run") % 2 == 0, "a step that saves was the last one"
    (disk / "filler").unlink()
    before = completed_steps(disk / "run")
    again = TrainProcess(config, f"schedule.steps={before + MORE}", cold=True)
    assert again.wait() == 0, again.text()
    again.assert_nothing_left()
    assert sorted(steps(disk / "run")) == list(range(1, before + MORE + 1))


@pytest.mark.parametrize(
    ("victim", "ends"),
    [
        ("driver", 2),
        ("ray::TrainerWorker", 2),
        *((victim, None) for victim in ("ray::Engine", "sglang::scheduler", "sglang::detokenizer")),
        *((f"-m slimx.engines.server.{part} ", None) for part in ("launch", "router_launch")),
        *((victim, None) for victim in ("/gcs_server ", "/raylet ", "multiprocessing.spawn")),
    ],
)
def test_a_process_without_file_descriptors_ends_the_run_or_continues(
    victim: str, ends: int | None, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, tiny_model, task_of_sums, reward={"isolation": "process", "workers": 1})
    run = TrainProcess(config, cold=True)
    directory = tmp_path / "run"
    run.until(lambda: completed_steps(directory) >= 2)
    process = run.driver
    if victim != "driver":
        process = next(
            process
            for process in run.processes()
            if victim in (command := command_of(process)) and "runtime.process" not in command
        )
    descriptors = process.num_fds()
    process.rlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    seen, began = completed_steps(directory), time.monotonic()
    while run.process.poll() is None and completed_steps(directory) < seen + LONG and time.monotonic() < began + 600:
        time.sleep(0.2)
    status = run.process.poll()
    print(f"{victim}: status {status}, {completed_steps(directory) - seen} more steps; {run.text()[-1500:]}")
    assert status == ends, run.text()
    assert ends is not None or completed_steps(directory) >= seen + LONG, run.stacks()
    if status is None:
        run.kill(signal.SIGTERM)
        run.wait()
    assert "Traceback" not in run.text()
    run.assert_nothing_left()


def test_a_clock_that_is_set_two_hours_ahead_and_back_changes_nothing(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, clock = tmp_path / "set_clock.so", tmp_path / "clock"
    source = Path(__file__).with_name("set_clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    clock.write_bytes(struct.pack("=q", 0))
    with monkeypatch.context() as inherited:
        inherited.setenv("LD_PRELOAD", str(library))
        inherited.setenv("SET_CLOCK", str(clock))
        run = TrainProcess(config_of(tmp_path, tiny_model, task_of_sums), cold=True)
    directory = tmp_path / "run"
    run.until(lambda: completed_steps(directory) >= 2)
    for ahead in (HOURS, 0, -HOURS):
        with clock.open("r+b") as file:
            file.write(struct.pack("=q", ahead))
        seen = completed_steps(directory)
        run.until(lambda seen=seen: completed_steps(directory) >= seen + MORE)
    run.until(lambda: abs(read_activity(directory)["written"] - (time.time() - HOURS)) < 600)
    activity = read_activity(directory)
    assert 600 > activity["written"] - activity["since"] >= 0
    run.kill(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.text()
    run.assert_nothing_left()
    times = [row["time"] for row in written(directory / "metrics.jsonl")]
    assert max(times) - min(times) > HOURS, "the clock of the run was set"
    phases = written(directory / "timeline.jsonl")
    assert not [line for line in phases if "restart" in line["name"]]
    assert all(0 <= line["seconds"] < HOURS / 2 for line in phases)
    assert "stalled" not in run.text()

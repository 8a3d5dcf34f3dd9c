"""The sbatch templates on a Slurm of two nodes on this machine: a job over both, a preemption, and a bad node."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.launching import write_setup
from tests.integration.recorded import ROWS, STEPS, losses, recorded_tokens, recording_config
from tests.integration.runs import DEADLINE_S, MARK, completed_steps
from tests.integration.slurm_stand import PROGRAMS, Slurm
from tests.refusals import numbers

pytestmark = [pytest.mark.integration, pytest.mark.needs(*PROGRAMS), pytest.mark.timeout(1800)]
TEMPLATE = "scripts/launch/disaggregated.sbatch"
LOST = ("FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
"""States of a job that has ended and will not come back."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs as root only")
    cluster = Slurm(tmp_path_factory.mktemp("slurm") / "c")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """A submitted template, and what it leaves behind."""

    def __init__(self, slurm: Slurm, directory: Path, *arguments: str, setup: Path | None = None, **environment: str):
        """`arguments`: of the template, after its options `--...`."""
        self.slurm, self.mark = slurm, uuid.uuid4().hex
        self.log, self.jobs = directory / "job.log", directory / "jobs"
        own = [argument for argument in arguments if argument.startswith("--")]
        self.number = slurm.submit(
            "--time=20",
            f"--output={self.log}",
            *own,
            TEMPLATE,
            *(argument for argument in arguments if not argument.startswith("--")),
            **{
                "SLIMX_GPUS": "0",
                "SLIMX_NODE_SETUP": str(setup or write_setup(directory)),
                "SLIMX_JOBS": str(self.jobs),
                "SLIMX_JOIN_S": str(DEADLINE_S),
                "SLIMX_HEALTH_S": str(DEADLINE_S),
                MARK: self.mark,
                **environment,
            },
        )

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while True:
            lost = self.slurm.state(self.number) in LOST  # before the condition, which may ask for such a state
            if condition():
                return
            assert not lost and time.monotonic() < end, self.text()
            time.sleep(0.1)

    def until_state(self, *states: str) -> None:
        self.until(lambda: self.slurm.state(self.number) in states)

    def text(self) -> str:
        """The job's log, with those of its nodes."""
        files = [self.log, *sorted(self.jobs.glob("*/*/*.log"))]
        return "\n".join(f"{file.name}:\n{file.read_text()[-4000:]}" for file in files if file.is_file())

    def assert_nothing_left(self) -> None:
        left = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    left.append(" ".join(process.cmdline())[:120])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        assert not left
        assert not list(self.jobs.rglob("token"))


@pytest.mark.slow("a whole run over two nodes")
def test_a_preempted_job_over_two_nodes_ends_with_the_same_losses(
    slurm: Slurm, uninterrupted: Path, tiny_model: Path, task_of_sums: Path, tmp_path: Path
):
    directory = tmp_path / "d"
    # Two steps and half a batch: where the signal finds it.
    config = recording_config(directory, tiny_model, task_of_sums, hold=2 * ROWS + ROWS // 2)
    job = Job(slurm, directory, "--nodes=2", str(config), "publish.transport=nixl")
    job.until(lambda: completed_steps(directory / "run") >= 2)
    urgent = slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    job.until(lambda: slurm.state(urgent) == "COMPLETED")
    (directory / "go").touch()
    job.until_state("COMPLETED", "FAILED")
    text = job.text()
    assert slurm.state(job.number) == "COMPLETED", text
    job.assert_nothing_left()
    # Three processes of a CPU each, two CPUs a node: the run was on both.
    assert any("127.0.0.2:" in line and 2 in numbers(line) for line in text.splitlines()), "two nodes in Ray"
    assert "back into the queue" in text and "resumed at step 2" in text
    assert sorted(path.name for path in (job.jobs / job.number).iterdir()) == ["0", "1"]
    undisturbed, resumed = losses(uninterrupted / "run"), losses(directory / "run")
    assert undisturbed.keys() == resumed.keys() == {*range(1, STEPS + 1)}
    for step in undisturbed:
        assert resumed[step] == undisturbed[step], step
    assert recorded_tokens(directory) == recorded_tokens(uninterrupted)


def test_a_job_on_a_bad_node_is_resubmitted_without_it(slurm: Slurm, tmp_path: Path):
    broken = "slimx() { [[ $SLURMD_NODENAME == n1 && $1 == health ]] && echo 'GPU-7: broken' && return 1; "
    setup = write_setup(tmp_path, broken + 'command slimx "$@"; }')
    job = Job(slurm, tmp_path, "--nodes=1", "--nodelist=n1", str(tmp_path / "absent.yaml"), setup=setup)
    job.until_state("COMPLETED", "FAILED")
    assert slurm.state(job.number) == "COMPLETED", job.text()
    again = (job.jobs / job.number / "0" / "resubmitted").read_text().strip()
    assert slurm.field(again, "ExcNodeList") == "n1"
    job.until(lambda: slurm.state(again) == "FAILED")  # there is no such file, which slimx says
    text = job.text()
    assert re.search(r"\bn1 .*GPU-7: broken", text) and re.search(rf"\b{again}\b.* n1$", text, re.MULTILINE)
    assert slurm.field(again, "BatchHost") == "n2" and slurm.field(again, "ExitCode") == "2:0"
    assert "absent.yaml" in text and "status 2;" in text
    last = Job(slurm, tmp_path, "--nodes=1", "--nodelist=n1", "absent", setup=setup, SLIMX_RESUBMITS="0")
    last.until_state("COMPLETED", "FAILED")
    assert slurm.state(last.number) == "FAILED" and "SLIMX_RESUBMITS" in last.text()
    job.assert_nothing_left()

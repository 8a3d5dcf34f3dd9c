"""The sbatch templates on a Slurm of two nodes on this machine: a job over both, a preemption, and a bad node."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from slimx.runtime.ports import free_port
from tests.integration.conftest import ROOT
from tests.integration.recorded import ROWS, STEPS, losses, recorded_tokens, recording_config
from tests.integration.runs import DEADLINE_S, MARK, completed_steps
from tests.refusals import numbers

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
START_S, END_S = 300.0, 300.0
CONF = """\
ClusterName=stand
SlurmctldHost={host}
SlurmctldAddr=127.0.0.1
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credentials are void: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=5
ReturnToService=2
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 Gres=gpu:8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
"""
pytestmark = [pytest.mark.integration, pytest.mark.needs(*PROGRAMS), pytest.mark.timeout(1800)]
TEMPLATE = "scripts/launch/disaggregated.sbatch"
LOST = ("FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
"""States of a job that has ended and will not come back."""


class Slurm:
    """Munged, slurmctld and two slurmd of its own, in a folder, on loopback; `stop` ends it with all its jobs.

    Debian's packages, as root, without systemd and cgroups. It shares nothing with a Slurm that the machine may have.
    """

    def __init__(self, folder: Path):
        self.folder, self.conf = folder, folder / "slurm.conf"
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        ports = {name: free_port() for name in ("controller", "first", "second")}
        self.conf.write_text(CONF.format(host=socket.gethostname().partition(".")[0], folder=folder, **ports))
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        munge = {"--key-file": "munge.key", "--socket": "munge.socket", "--pid-file": "munge.pid"}
        munge |= {"--log-file": "munge.log", "--seed-file": "munge.seed"}
        paths = [f"{option}={self.folder / name}" for option, name in munge.items()]
        self._run("munged", "--foreground", "--force", "--num-threads=2", *paths)
        self._wait((self.folder / "munge.socket").exists, "munged")
        self._run("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", node)
        self._wait(lambda: self.call("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * 2, "two nodes")

    def submit(self, *arguments: str, **environment: str) -> str:
        """Runs `sbatch` from the root of the repository; returns the job's number."""
        return self.call("sbatch", "--parsable", *arguments, environment=environment).strip()

    def state(self, job: str) -> str:
        """Returns PENDING, RUNNING, COMPLETED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """Returns a field of the job's record."""
        found = re.search(rf"\b{name}=(\S*)", self.call("scontrol", "show", "job", "-o", job))
        assert found, name
        return found[1]

    def call(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Returns a client command's output; its errors are in it."""
        done = subprocess.run(
            arguments,
            env={**self.environment, **(environment or {})},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
        return done.stdout

    def stop(self) -> None:
        try:
            self.call("scancel", "--user=root")
            self._wait(lambda: not self.call("squeue", "-h").strip(), "the end of all jobs", END_S)
        finally:
            self._end()

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _run(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
        with (self.folder / f"{program}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen([path, *arguments], env=self.environment, stdout=out, stderr=subprocess.STDOUT)
            )

    def _wait(self, condition: Callable[[], object], what: str, seconds: float = START_S) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = [
                    f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.[lo][ou][gt]"))
                ]
                raise AssertionError(f"waited {seconds:.0f} s for {what}\n" + "\n".join(logs))
            time.sleep(0.1)


def write_setup(directory: Path, *lines: str) -> Path:
    """Writes a file for SLIMX_NODE_SETUP: node k of a job has the address 127.0.0.(k + 2). `lines` follow."""
    setup = directory / "setup.sh"
    address = "SLIMX_ADDRESS=127.0.0.$((2 + ${NODE_RANK:-${SLURM_PROCID:-0}}))"
    setup.write_text("\n".join([address, f"export PYTHONPATH={ROOT} PYTHONWARNINGS=ignore", *lines, ""]))
    return setup


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
        options = [argument for argument in arguments if argument.startswith("--")]
        self.number = slurm.submit(
            "--time=20",
            f"--output={self.log}",
            *options,
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
        """Returns the job's log, with those of its nodes."""
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

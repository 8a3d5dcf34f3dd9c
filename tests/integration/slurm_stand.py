"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd of its own, in a folder, on loopback.

Debian's packages, as root, without systemd and cgroups. It shares nothing with a Slurm that the machine may have.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from slimx.runtime.ports import free_port

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
# A requeued job waits until its old credentials are void: 120 s unless told otherwise.
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


class Slurm:
    """A running cluster; `stop` ends it with all its jobs."""

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
        """`sbatch` from the root of the repository; the job's number."""
        return self.call("sbatch", "--parsable", *arguments, environment=environment).strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """A field of the job's record."""
        found = re.search(rf"\b{name}=(\S*)", self.call("scontrol", "show", "job", "-o", job))
        assert found, name
        return found[1]

    def call(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """A client command's output; its errors are in it."""
        done = subprocess.run(
            arguments,
            env={**self.environment, **(environment or {})},
            cwd=Path(__file__).parents[2],
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

    def _wait(self, condition, what: str, seconds: float = START_S) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = [
                    f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.[lo][ou][gt]"))
                ]
                raise AssertionError(f"waited {seconds:.0f} s for {what}\n" + "\n".join(logs))
            time.sleep(0.1)

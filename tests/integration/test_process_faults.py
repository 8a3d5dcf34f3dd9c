"""Every kind of process of a run is killed, and stopped: the run goes on, or ends in one sentence and resumes.

A row of FAULTS is one kind and one signal. They run in `make test-all`; `make test` has a killed driver in
`test_resume.py`, a killed trainer and a SIGTERM in `test_run.py`.
"""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP

import pytest

from slimx.errors import LOST
from tests.integration.fault_stand import Fault, strike

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("full grid of processes and signals"),
    pytest.mark.timeout(1800),
]

FAULTS = [
    Fault("driver", SIGINT, ends=128 + SIGINT),
    Fault("driver", SIGKILL, ends=-SIGKILL),
    Fault("driver", SIGSTOP, ends=None, lasts=40, sections={"rollout": {"rollout_deadline": 20}}),
    Fault("trainer", SIGKILL, ends=LOST, names="trainer rank "),
    Fault("trainer", SIGSTOP, ends=LOST, names="trainer rank "),
    Fault("raylet", SIGKILL, ends=LOST, names="Ray's raylet "),
    Fault("raylet", SIGSTOP, ends=LOST, names="Ray's raylet "),
    Fault("dashboard agent", SIGKILL, ends=LOST, names="Ray's "),
    Fault("runtime environment agent", SIGKILL, ends=LOST, names="Ray's "),
    Fault("gcs", SIGKILL, ends=LOST, names="Ray's GCS "),
    Fault("gcs", SIGSTOP, ends=LOST, names="Ray's GCS "),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_run_whose_process_is_killed_or_stopped(
    fault: Fault, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    strike(fault, tmp_path, tiny_model, task_of_sums / "train.jsonl")
    if (fault.victim, fault.signum) == ("trainer", SIGSTOP):
        (stacks,) = (tmp_path / "run/stacks").iterdir()
        assert "==== trainer-0" in stacks.read_text(), "where everybody was when it was given up"

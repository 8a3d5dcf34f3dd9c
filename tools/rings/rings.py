"""The pytest sessions of ring one and ring two."""

from __future__ import annotations

from tools.rings.parts import part_of, test_files
from tools.rings.sessions import ROOT, Session, pytest_session

REPORT = ("-rfEs", "--durations=20")
WORKERS = ("--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=0", "--numprocesses")
"""A file's tests stay together and share its fixtures. A worker that dies ends the session with a failed test: the one
that took its place would get no tests and be waited for. The number of workers follows."""


def ring_one(seed: int) -> list[Session]:
    """Returns two sessions, as unit tests compute while integration tests wait for Ray, a server or a deadline.

    Their priority is the same: unit tests that were niced waited for minutes while ranks computed, missed deadlines of
    seconds, and ended last.
    """
    return [
        pytest_session("integration", seed, [*REPORT, *WORKERS, "2", "tests/integration"]),
        pytest_session("unit", seed, [*REPORT, *WORKERS, "3", "tests/unit", "tests/extras"], at_end=True),
    ]


def ring_two(seed: int, part: str | None) -> list[Session]:
    """Returns one session of all tests, the slow ones too; of those of the files of `part` where it is not None."""
    files = [file for file in test_files(ROOT) if part in (None, part_of(file))]
    return [pytest_session("all", seed, [*REPORT, *WORKERS, "2", "-m", "slow or not slow", *files])]

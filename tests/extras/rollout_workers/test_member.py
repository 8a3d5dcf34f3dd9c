"""Jobs of a worker as the driver sends them, without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slimx.data.records import Group, Prompt
from slimx.extras.rollout_workers.jobs import MAX_LOSSES
from slimx.extras.rollout_workers.member import Member
from slimx.extras.rollout_workers.messages import Job, Setup
from slimx.rollout.flow.progress import GroupProgress
from slimx.rollout.flow.rollouts import GroupOutcome
from tests.unit.rollout.rollout_stand import config_of

PROMPT = Prompt(id="p")


class Recorded(Member):
    """A member that notes its calls to the worker."""

    def __init__(self, directory: Path):
        self.calls: list[tuple[str, list[int]]] = []
        setup = Setup(endpoints={}, frozen={}, context=1, concurrency=1, max_rollouts=1, journal=str(directory / "j"))
        nothing: Any = None
        super().__init__(
            0,
            config_of(),
            setup,
            nothing,
            directory,
            deadline_s=1,
            note=nothing,
            record=nothing,
            look=nothing,
            retried=nothing,
        )
        self._ready.set()

    def _create(self) -> Any:
        return None

    async def call(self, method: str, what: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        self.calls.append((method, [job.serial for job in arguments[0]]))

    def tell(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments[0]))


@contextmanager
def performing(member: Member, count: int) -> Iterator[list[asyncio.Task[Any]]]:
    jobs = [
        Job(serial=n, prompt=PROMPT, group_id=f"g{n}", number=n, evaluation=None, versions={}) for n in range(count)
    ]
    tasks = [asyncio.create_task(member.perform(job, GroupProgress())) for job in jobs]
    yield tasks
    for task in tasks:
        task.cancel()


async def test_jobs_of_one_moment_are_sent_in_one_call(tmp_path):
    member = Recorded(tmp_path)
    with performing(member, 3):
        await asyncio.sleep(0.01)
    assert member.calls == [("submit", [0, 1, 2])]


@pytest.mark.parametrize("ends", ["cancelled", "finished"])
async def test_suspects_are_sent_one_at_a_time_however_each_ends(tmp_path, ends):
    member = Recorded(tmp_path)
    with performing(member, 3) as tasks:
        await asyncio.sleep(0.01)
        member.calls.clear()
        for open_job in member.jobs.values():
            open_job.losses = MAX_LOSSES - 1
            open_job.sent = False
        member._flush()
        for n in range(3):
            await asyncio.sleep(0.01)
            assert member.calls.pop() == ("submit", [n]) and member.suspicious
            if ends == "cancelled":
                tasks[n].cancel()
            else:
                member.jobs[n].outcome.set_result(GroupOutcome(Group(id=f"g{n}", prompt=PROMPT, trajectories=[])))
            await asyncio.wait({tasks[n]})
    assert not member.suspicious

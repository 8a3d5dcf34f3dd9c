"""A checkpoint of a PPO run is complete when policy and critic are, and goes back to runs that have both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slimx.errors import DeadlineError
from slimx.layout.ranks import Sizes
from slimx.observability.tracking.phases import Timeline
from slimx.orchestration.state import checkpoints as module
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.resume import check_resume, layout_of
from slimx.orchestration.state.saves import Saves, read_state
from slimx.trainer.checkpoint.files import read_manifest
from tests.refusals import refused
from tests.unit.orchestration.checkpointing_stand import Trainers, config, state, trained

CRITIC = Sizes(pipeline=2)


class Critics(Trainers):
    """Two ranks of a critic that write on request."""

    name, sizes = "critic", CRITIC

    @property
    def ranks(self) -> Critics:
        return self


class Bench:
    def __init__(self, tmp_path: Path, **options: object):
        self.config, self.saves = config(tmp_path, **options), Saves(tmp_path / "checkpoints", keep=2)
        self.trainers, self.critic = Trainers(self.config), Critics(self.config)
        self.checkpoints = Checkpointer(
            {"actor": self.trainers}, self.saves, Timeline(tmp_path), lambda text: None, critic=self.critic
        )

    async def save(self) -> Path:
        await self.checkpoints.save(state(3, critic=layout_of(CRITIC)))
        for ranks in (self.trainers, self.critic):
            for rank in range(2):
                ranks.write(rank)
        await self.checkpoints.settle()
        path = self.saves.newest()
        assert path is not None
        return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)


async def test_it_is_complete_when_the_critics_ranks_have_written_too(tmp_path):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(3, critic=layout_of(CRITIC)))
    for rank in range(2):
        bench.trainers.write(rank)
    bench.critic.write(0)
    await asyncio.sleep(0.05)
    assert bench.saves.newest() is None
    bench.critic.write(1)
    await bench.checkpoints.settle()
    path = bench.saves.newest()
    written = read_manifest(path)
    assert {"__1_0.distcp", "critic/__0_0.distcp", "critic/__1_0.distcp"} <= written.keys()
    assert all((path / name).stat().st_size == record.size for name, record in written.items())
    assert not list(path.rglob("reports"))
    (path / "critic" / "__1_0.distcp").unlink()
    with refused("checkpoint.damaged", about=str(path / "critic" / "__1_0.distcp")):
        check_resume(path, read_state(path), trained(bench.config), CRITIC)


async def test_a_critics_rank_that_never_writes_is_named_as_one(tmp_path):
    bench = Bench(tmp_path, deadline=0.1)
    await bench.checkpoints.save(state(3))
    for rank in range(2):
        bench.trainers.write(rank)
    bench.critic.write(1)
    with pytest.raises(DeadlineError) as late:
        await bench.checkpoints.settle()
    assert late.value.holder == "critic rank 0"


async def test_policy_and_critic_are_restored_each_by_its_layout(tmp_path):
    bench = Bench(tmp_path)
    path = await bench.save()
    await bench.checkpoints.restore(path, read_state(path))
    await bench.checkpoints.restore(path, state(3, critic=layout_of(Sizes(tensor=2))))
    assert bench.trainers.restored == [(path, True, True)] * 2
    assert bench.critic.restored == [(path / "critic", True, True), (path / "critic", False, True)]


@pytest.mark.parametrize(
    ("there", "here", "code"),
    [
        (None, CRITIC, "resume.no_critic"),
        (layout_of(CRITIC), None, "resume.critic"),
        (layout_of(CRITIC), Sizes(data=2, expert=2), "resume.layout"),
    ],
)
async def test_a_run_that_does_not_fit_the_checkpoint_is_refused(tmp_path, there, here, code):
    bench = Bench(tmp_path)
    path = await bench.save()
    about = "critic.layout.expert" if code == "resume.layout" else str(path)
    with refused(code, about=about):
        check_resume(path, state(3, critic=there), trained(bench.config), here)
    check_resume(path, read_state(path), trained(bench.config), CRITIC)

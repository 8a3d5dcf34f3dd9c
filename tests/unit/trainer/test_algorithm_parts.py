"""Inputs of algorithms from other parts: sums over split sequences, a greedy rollout, described turns, pairs;
and the mismatch that is always measured."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slimx.algorithms.advantages.estimate import StepData, all_advantages, finish_advantages
from slimx.config.sections.eval import Eval
from slimx.data.batch import TrainBatch
from slimx.data.packing import pack, zigzag
from slimx.data.records import Prompt, Trajectory, Turn
from slimx.data.saved.codec import load_groups, save_groups
from slimx.extras.preferences import hook as preferences
from slimx.orchestration.batches import make_update_rows
from slimx.orchestration.step.reference import refresh_reference, restore_reference
from slimx.orchestration.step.train import estimate_advantages
from slimx.rollout import single_turn
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RewardContext, RolloutContext
from slimx.trainer.context import ContextShard
from slimx.trainer.step.metrics import mismatch_metrics, mismatch_sums
from tests.refusals import refused
from tests.unit.algorithms.advantage_stand import group
from tests.unit.rollout.rollout_stand import FakeEngine, Stand, config_of, one


@pytest.mark.parametrize("size", [1, 2])
def test_every_token_gets_the_sum_of_its_whole_sequence(size, monkeypatch):
    """Sequences of 4 and 8 tokens with values 0, 1, 2, ...: 6 and 60. The ranks' sums are added up by all_reduce."""
    lengths, values = [4, 8], torch.arange(12.0)
    parts = [torch.from_numpy(zigzag(lengths, size, rank)) for rank in range(size)]
    partials = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums, group: partials.append(sums.clone()))
    for rank, part in enumerate(parts):
        ContextShard(size, rank, None).sequence_sum(values[part], lengths)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums, group: sums.copy_(sum(partials)))
    for rank, part in enumerate(parts):
        found = ContextShard(size, rank, None).sequence_sum(values[part].requires_grad_(), lengths)
        assert found.tolist() == [6.0 if index < 4 else 60.0 for index in part.tolist()]
        assert not found.requires_grad and found.dtype == torch.float32


def test_the_mismatch_by_hand_and_in_two_parts():
    """Ratios policy / engine 2, 1, 0.5 at trained tokens: sum 3.5, squares 5.25: 12.25 / 15.75 of them count."""
    policy = torch.tensor([0.4, 0.3, 0.2, 0.9]).log()
    engine = torch.tensor([0.2, 0.3, 0.4, 0.1]).log()
    trained = torch.tensor([True, True, True, False])
    halves = [mismatch_sums(policy[s], engine[s], trained[s]) for s in (slice(0, 1), slice(1, 4))]
    joined = {
        name: float(max(a[1], b[1]) if a[0] == "max" else a[1] + b[1])
        for name, (a, b) in ((name, (halves[0][name], halves[1][name])) for name in halves[0])
    }
    metrics = mismatch_metrics(joined | {"loss/policy": 1.0})
    assert metrics.keys() == {"loss/policy", *(f"mismatch/{n}" for n in ("mean", "max", "k3", "ratio", "ess"))}
    assert metrics["mismatch/ess"] == pytest.approx(12.25 / 15.75, rel=1e-5)
    assert metrics["mismatch/mean"] == pytest.approx(2 * math.log(2) / 3, rel=1e-5)
    assert metrics["mismatch/max"] == pytest.approx(math.log(2), rel=1e-5)
    assert metrics["mismatch/ratio"] == pytest.approx(3.5 / 3, rel=1e-5)
    # KL(engine || policy) by k3: r - 1 - ln r of 2, 1 and 0.5.
    assert metrics["mismatch/k3"] == pytest.approx((2 - 1 + 0.5 - 1) / 3, rel=1e-4)
    assert mismatch_metrics({"loss/sft": 1.0}) == {"loss/sft": 1.0}
    nothing = {name: float(value) for name, (_, value) in mismatch_sums(policy, engine, trained & False).items()}
    assert math.isnan(mismatch_metrics(nothing)["mismatch/ess"])


async def greedy_scores(ctx: RewardContext, trajectory: Trajectory) -> float:
    return 7.0 if trajectory.sampling["temperature"] == 0 else 1.0


class ColdEngine(FakeEngine):
    """Says at which temperature it sampled, as the real client does."""

    async def generate(self, request: GenerationRequest) -> Completion:
        return replace(await super().generate(request), temperature=request.temperature)


@pytest.mark.parametrize("name", ["remax", "grpo"])
async def test_remax_gets_the_reward_of_a_greedy_rollout_that_is_not_trained(name):
    async with Stand(config_of(algorithm__name=name), reward=greedy_scores, engine=ColdEngine()) as stand:
        groups = (await stand.next_batch()).groups
        evaluated = await stand.maker.make(groups[0].prompt, group_id="eval0", number=0, evaluation=Eval())
        temperatures = [request.temperature for request in stand.engine.requests]
    for made in groups:
        assert [trajectory.reward for trajectory in made.trajectories] == [1.0, 1.0]
        assert made.baseline == (7.0 if name == "remax" else None)
    assert evaluated.group.baseline is None
    assert temperatures.count(0.0) == (5 if name == "remax" else 1) and temperatures.count(1.0) == 8


async def test_a_greedy_rollout_that_fails_drops_its_group():
    async def failing(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        if ctx.engine.sampling["temperature"] == 0:
            raise ValueError("greedy fails")
        return await single_turn.generate(ctx, prompt)

    config = config_of(algorithm__name="remax", max_failed_share=0.0)
    async with Stand(config, generate=failing, reward=one) as stand:
        with refused("rollout.failed", about="rollout.max_failed_share") as caught:
            await stand.next_batch()
    assert "greedy fails" in str(caught.value)


async def test_a_hook_describes_its_turns_and_they_are_kept(tmp_path: Path):
    async def two_turns(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        draft = ctx.draft(prompt)
        with refused("draft.turn", about=f"{ctx.group_id}/{ctx.index}"):
            draft.describe_turn(state_key="s")
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=0))
        draft.add_inserted([5])
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1))
        draft.describe_turn(state_key="s", reward=0.5)
        return draft.finish()

    async with Stand(config_of(), generate=two_turns, reward=one) as stand:
        groups = (await stand.next_batch()).groups
    assert groups[0].trajectories[0].turns == [Turn(), Turn(reward=0.5, state_key="s")]
    groups[0].baseline = 0.25
    save_groups(tmp_path / "groups.bin", groups)
    found = load_groups(tmp_path / "groups.bin")[0]
    assert found.trajectories[0].turns == groups[0].trajectories[0].turns and found.baseline == 0.25


async def test_a_pair_from_a_file_is_two_rollouts_with_rewards_1_and_0():
    dpo = {"name": "dpo"}
    config = config_of(engines=[], reward__function=None, **{f"algorithm__{key}": value for key, value in dpo.items()})
    async with Stand(config, generate=preferences.generate) as stand:
        prompt = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}], answer="2", metadata={"rejected": "33"})
        outcome = await stand.maker.make(prompt, group_id="g", number=0)
        broken = await stand.maker.make(Prompt(id="q", token_ids=[1], answer="2"), group_id="h", number=1)
        tokenizer = stand.maker.policies["actor"].tokenizer
    chosen, rejected = outcome.group.trajectories
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    for trajectory, text in ((chosen, "2"), (rejected, "33")):
        trained = trajectory.token_ids[trajectory.loss_mask.astype(bool)].tolist()
        assert trained == [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert np.array_equal(chosen.token_ids[:3], rejected.token_ids[:3])
    assert broken.reason and "prompt q " in broken.detail


class FakeTrainers:
    """Log-probs that tell by whom they are and of which label."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def logprobs(self, batch: TrainBatch, *, under: str) -> list[list[np.ndarray]]:
        self.requests.append(under)
        sign = {"policy": -0.01, "reference": -0.02}[under]
        return [[sign * micro.labels for micro in shard] for shard in batch.shards]


@pytest.mark.parametrize(
    ("algorithm", "scored"),
    [
        ({"name": "dpo"}, ["policy", "reference"]),
        ({"name": "reinforce_pp", "reference": True, "kl_reward_coef": 0.1}, ["reference"]),
        ({"name": "reinforce_pp"}, []),
        ({"name": "kl_cov", "loss": {"share": 0.2}}, []),
    ],
)
async def test_only_required_scores_are_computed_and_reach_their_rows(algorithm, scored):
    """As in one process: rows packed in two micro-batches of two ranks come back to the rows that they were."""
    config = config_of(**{f"algorithm__{key}": value for key, value in algorithm.items()})
    groups = [group("a", [1.0, 0.0]), group("b", [0.0, 1.0])]
    for number, trajectory in enumerate(t for g in groups for t in g.trajectories):
        trajectory.token_ids = trajectory.token_ids + 10 * number
    (rows,) = make_update_rows(config, groups, lambda groups: all_advantages(config.algorithm, groups))
    trainers = FakeTrainers()

    async def with_retry(work):
        return await work()

    actor = SimpleNamespace(trainers=trainers, packer=lambda r: pack(r, data_size=2, max_tokens=4))
    recovery = SimpleNamespace(with_retry=with_retry)
    run = SimpleNamespace(config=config, step=3, critic=None, policies={"actor": actor}, recovery=recovery)
    assert config.algorithm.needs_whole_step
    metrics = await estimate_advantages(run, groups, [rows])
    assert trainers.requests == scored
    policy, reference = ([sign * row.labels for row in rows] for sign in (-0.01, -0.02))
    (expected_rows,) = make_update_rows(config, groups, lambda groups: all_advantages(config.algorithm, groups))
    logprobs = {"policy": policy, "reference": reference if scored else None}
    step = StepData(groups=groups, updates=[expected_rows], **logprobs, seed=(config.run.seed, 3))
    expected = finish_advantages(config.algorithm, step)
    assert metrics == pytest.approx(expected)
    for row, other in zip(rows, expected_rows, strict=True):
        assert row.advantages.tolist() == other.advantages.tolist()
        assert (row.selected is None) == (other.selected is None) == (config.algorithm.loss.kind != "kl_cov")


class FakeRun:
    """Counts steps, and writes an empty directory for an export."""

    def __init__(self, directory: Path, refresh: int) -> None:
        self.recovery = SimpleNamespace(bases=set, with_retry=self.with_retry)
        self.directory, self.step, self.loaded = directory, 0, []
        self.config = config_of(algorithm__reference=True, algorithm__reference_refresh=refresh)
        self.policies = {"actor": SimpleNamespace(trainers=self)}

    def due(self, every: int) -> bool:
        return self.step % every == 0

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        yield

    async def with_retry(self, work: Callable[[], Awaitable[None]]) -> None:
        await work()

    async def refresh_reference(self, path: Path | None = None) -> None:
        self.loaded.append(path)

    async def export(self, name: str) -> None:
        (self.directory / name).mkdir()


async def test_a_resumed_run_finds_the_reference_of_its_step_and_the_others_go(tmp_path: Path):
    run = FakeRun(tmp_path, refresh=3)
    for run.step in range(1, 11):
        await refresh_reference(run)
        if run.step in (1, 5, 8):  # a run that is told to leave saves at any step
            (tmp_path / "checkpoints" / f"iter_{run.step:07d}").mkdir(parents=True)
    assert sorted(path.name for path in tmp_path.glob("reference-*")) == [f"reference-{n:06d}" for n in (3, 6, 9)]
    shutil.rmtree(tmp_path / "checkpoints" / "iter_0000005")
    run.step = 12
    await refresh_reference(run)
    assert sorted(path.name for path in tmp_path.glob("reference-*")) == ["reference-000006", "reference-000012"]
    assert run.loaded == [None] * 4
    run.loaded, run.step = [], 8
    await restore_reference(run, tmp_path / "checkpoints" / "iter_0000008")
    assert run.loaded == [tmp_path / "reference-000006"]
    run.step = 1
    await restore_reference(run, tmp_path / "checkpoints" / "iter_0000001")
    assert len(run.loaded) == 1, "the initial weights are there from the start"
    run.step = 5
    with refused("reference.lost", about=str(tmp_path / "reference-000003")):
        await restore_reference(run, tmp_path / "checkpoints" / "iter_0000005")


async def test_the_reference_of_a_state_that_new_trainers_may_begin_from_stays(tmp_path: Path):
    run = FakeRun(tmp_path, refresh=3)
    run.recovery.bases = lambda: {5}
    for run.step in (3, 6, 9):
        await refresh_reference(run)
    assert sorted(path.name for path in tmp_path.glob("reference-*")) == ["reference-000003", "reference-000009"]


@pytest.mark.parametrize("links", [True, False])
async def test_a_fork_takes_the_reference_of_its_checkpoint_along(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
):
    first, fork = tmp_path / "first", FakeRun(tmp_path / "fork", refresh=3)
    (first / "reference-000006").mkdir(parents=True)
    (first / "reference-000006" / "model.safetensors").write_text("weights")
    fork.directory.mkdir()
    if not links:

        def link(origin: str, path: str) -> None:
            raise OSError(errno.EXDEV, "another file system", origin)

        monkeypatch.setattr(os, "link", link)
    fork.step = 8
    await restore_reference(fork, first / "checkpoints" / "iter_0000008")
    shutil.rmtree(first)
    assert fork.loaded == [fork.directory / "reference-000006"]
    assert (fork.loaded[0] / "model.safetensors").read_text() == "weights"
    assert os.listdir(fork.directory) == ["reference-000006"]

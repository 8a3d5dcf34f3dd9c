"""A critic in a step: rows keep their order through any packing, and invalid combinations are refused."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import MicroBatch, TrainingRow
from slimx.data.packing import pack
from slimx.data.sampling_support import Support
from slimx.extras.token_level.token_rewards import assign_advantages
from slimx.layout.ranks import Sizes
from slimx.orchestration.ranks.critic import CriticGroup
from tests.refusals import invalid
from tests.unit.algorithms.naive_gae import naive


def row(number: int, length: int) -> TrainingRow:
    """Makes a row that is trained at about half of the positions, at least at one."""
    random = np.random.default_rng(number)
    mask = random.random(length) < 0.5
    mask[random.integers(length)] = True
    return TrainingRow(
        tokens=np.full(length, number + 1),
        labels=np.arange(length),
        weight=mask.astype(np.float32) / 100,
        advantages=np.zeros(length, np.float32),
        rollout_logprobs=-random.random(length).astype(np.float32),
        versions=np.zeros(length, np.int64),
        temperature=np.ones(length, np.float32),
        routed_experts=None,
    )


def rows() -> list[TrainingRow]:
    return [row(number, length) for number, length in enumerate((7, 3, 12, 1, 9, 5, 8))]


@pytest.mark.parametrize(
    "layout",
    [
        {"data_size": 1, "max_tokens": 64},
        {"data_size": 2, "max_tokens": 16, "multiple_of": 4},
        {"data_size": 3, "max_tokens": 12, "sequence_multiple": 4, "count_multiple": 2},
    ],
)
def test_outputs_of_packed_rows_are_unpacked_row_by_row(layout):
    inputs = rows()
    batch = pack(inputs, **layout)
    outputs = [[np.stack([b.tokens, b.labels], 1) for b in shard] for shard in batch.shards]
    for one, found in zip(inputs, batch.unpack(outputs, inputs), strict=True):
        assert np.array_equal(found, np.stack([one.tokens, one.labels], 1))


def test_values_and_returns_are_packed_like_their_tokens():
    inputs = rows()
    for number, one in enumerate(inputs):
        one.values, one.returns = (np.full(len(one), sign * (number + 1), np.float32) for sign in (1, -1))
    for batch in pack(inputs, data_size=1, max_tokens=16, multiple_of=8).shards[0]:
        assert np.array_equal(batch.values, batch.tokens) and np.array_equal(batch.returns, -batch.tokens)
    assert pack(rows(), data_size=1, max_tokens=64).shards[0][0].values is None


class Ranks:
    """Those of a critic; what they were sent last."""

    sent: list[list[MicroBatch]]

    async def sharded(self, shards: list[Any]) -> list[Any]:
        self.sent = [list(chain.from_iterable(s)) if isinstance(s[0], list) else s for s in shards]
        return []

    async def call(self, method: str, what: str, **arguments: Any) -> list[Any]:
        return []

    def by_shard(self, results: list[Any]) -> list[list[np.ndarray]]:
        return [[np.zeros(len(batch.tokens), np.float32) for batch in shard] for shard in self.sent]

    def metrics_of(self, results: list[Any]) -> dict[str, float]:
        return {}


async def test_a_critic_is_sent_nothing_that_only_a_policy_reads():
    inputs, ranks = rows(), Ranks()
    for one in inputs:
        one.routed_experts = np.zeros((len(one), 2, 2), np.uint8)
        one.support = Support.everything(len(one))
        one.teacher_logprobs = one.values = one.returns = np.zeros(len(one), np.float32)
    packer = partial(pack, data_size=2, max_tokens=64)
    critic = CriticGroup(config(critic={}), Sizes(data=2), packer, trainers=ranks, log_dir=Path(), device="cpu")
    for work in (critic.values(inputs), critic.train_step([inputs[:4], inputs[4:]], step=0)):
        await work
        for batch in chain.from_iterable(ranks.sent):
            assert batch.routed_experts is None and batch.support is None and batch.teacher_logprobs is None
    assert all(one.routed_experts is not None and one.support is not None for one in inputs)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_rows_get_advantages_from_their_scores_values_and_penalties(whiten, kl_coef):
    algorithm = Algorithm(
        name="ppo",
        advantages={"gamma": 0.95, "lam": 0.8, "whiten": whiten},
        kl_reward_coef=kl_coef,
        reference=kl_coef > 0,
    )
    inputs, random = rows(), np.random.default_rng(5)
    scores = random.normal(size=len(inputs)).tolist()
    values = [random.normal(size=len(one)).astype(np.float32) for one in inputs]
    reference = [random.normal(size=len(one)).astype(np.float32) for one in inputs] if kl_coef else None
    metrics = assign_advantages(algorithm, inputs, scores, values, reference)
    expected, returns = [], []
    for number, one in enumerate(inputs):
        mask = (one.weight > 0).tolist()
        rewards = [0.0] * len(one)
        for t in range(len(one)):
            if mask[t] and reference is not None:
                rewards[t] -= kl_coef * float(one.rollout_logprobs[t] - reference[number][t])
        rewards[max(t for t in range(len(one)) if mask[t])] += scores[number]
        advantages, row_returns = naive(rewards, values[number].tolist(), mask, 0.95, 0.8)
        assert one.returns.tolist() == pytest.approx(row_returns, abs=1e-6)
        assert np.array_equal(one.values, values[number])
        expected += [a for a, trained in zip(advantages, mask, strict=True) if trained]
        returns += [r for r, trained in zip(row_returns, mask, strict=True) if trained]
        assert not one.advantages[~(one.weight > 0)].any()
    found = np.concatenate([one.advantages[one.weight > 0] for one in inputs])
    mean, deviation = np.mean(expected), np.std(expected)
    assert found == pytest.approx((expected - mean) / deviation if whiten else expected, abs=1e-5)
    assert metrics["advantage/mean"] == pytest.approx(mean) and metrics["advantage/std"] == pytest.approx(deviation)
    assert metrics["return/mean"] == pytest.approx(np.mean(returns))
    assert ("kl/reward" in metrics) == (kl_coef > 0)


# Configuration --------------------------------------------------------------------------------------------------------


def config(**sections: Any) -> Config:
    base = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "algorithm": {"name": "ppo"}}
    return Config.model_validate({**base, **sections})


@pytest.mark.parametrize(
    ("sections", "code", "about"),
    [
        ({}, "algorithm.critic", "algorithm.name"),
        ({"algorithm": {"name": "grpo"}, "critic": {}}, "algorithm.critic", "critic"),
        ({"critic": {"layout": {"tensor": 2}}}, "critic.placement", "critic.layout"),
        (
            {"critic": {"placement": "own", "layout": {"world_size": 2, "tensor": 4}}},
            "critic.layout",
            "critic.layout",
        ),
        ({"algorithm": {"advantages": {"lam": 0.9}}}, "algorithm.unused", "algorithm.advantages.lam"),
        (
            {"algorithm": {"name": "ppo", "kl_reward_coef": 0.1}, "critic": {}},
            "algorithm.reference",
            "algorithm.kl_reward_coef",
        ),
        ({"rollout": {"prompts": "p", "engines": []}, "critic": {}}, "algorithm.engines", "rollout.engines"),
    ],
)
def test_a_critic_that_cannot_work_is_refused(sections, code, about):
    with invalid(code, about=about):
        config(**sections)


def test_critic_settings_default_to_those_of_the_trainer():
    trainer = {"world_size": 4, "tensor": 2, "threads": 3, "deadline": 77, "load": "sft", "megatron": {}}
    trainer["megatron"] = {"mtp_num_layers": 1, "apply_rope_fusion": False}
    section = {"value_clip": 0.1, "optimizer": {"lr": 2e-5}}
    shared = config(trainer=trainer, critic=section).as_critic()
    assert (shared.trainer.world_size, shared.trainer.tensor, shared.trainer.deadline) == (4, 2, 77)
    assert shared.trainer.optimizer.lr == 2e-5 and shared.initial_weights == "sft"
    assert shared.trainer.megatron == {"apply_rope_fusion": False}, "a critic predicts no tokens"
    separate = {**section, "placement": "own", "layout": {"world_size": 2, "pipeline": 2}, "load": "reward model"}
    other = config(trainer=trainer, critic=separate).as_critic()
    assert (other.trainer.world_size, other.trainer.tensor, other.trainer.pipeline) == (2, 1, 2)
    assert other.trainer.threads == 3 and other.initial_weights == "reward model"
    # The critic's ranks get it as JSON and ask again.
    sent = Config.model_validate(other.model_dump(mode="json"))
    assert sent.model_dump() == sent.as_critic().model_dump() == other.model_dump()

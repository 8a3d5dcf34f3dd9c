"""Engine, reward and filter for both sides of benchmarks/rollout_buffer.py.

Both sides get the same answers in the form of SGLang's JSON, in the order of requests: prompts of 64 tokens, answers of
lognormal length (sigma 1, mean about `mean` tokens), a reward of 0 or 1 that is the same for all answers of some
prompts.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.hooks import RewardContext

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS, GROUP_SIZE, RANKS = 64, 16, 8
LONGEST = 16
"""Multiple of the mean length at which an answer is truncated."""
SEED = 1


class Answers:
    """The answers to all requests of a prompt, made in advance."""

    def __init__(self, prompts: int, mean: int):
        random = np.random.default_rng(SEED)
        lengths = random.lognormal(np.log(mean) - 0.5, 1.0, (prompts, GROUP_SIZE)).astype(int)
        self.lengths = lengths.clip(1, LONGEST * mean)
        self.chance = random.choice([0.0, 0.3, 0.7, 1.0], prompts, p=[0.1, 0.4, 0.4, 0.1])
        self.rewards = (random.random((prompts, GROUP_SIZE)) < self.chance[:, None]).astype(float)
        longest = int(self.lengths.max())
        ids = random.integers(4, 100, longest).tolist()
        logprobs = (-random.random(longest)).tolist()
        self._entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        self._ids = ids

    def meta(self, prompt: int, index: int) -> dict[str, Any]:
        """Returns the `meta_info` of SGLang's response. Answers of equal length share the objects of its entries."""
        length = int(self.lengths[prompt, index])
        return {
            "output_token_logprobs": self._entries[:length],
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
        }


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the reward of `Answers`."""
    return ctx.prompt.metadata["rewards"][trajectory.index]


def keep(group: Group) -> bool | str:
    """Drops groups whose rewards are all equal, as dynamic sampling does."""
    return len({trajectory.reward for trajectory in group.trajectories}) > 1 or "one reward"


def make_prompts(answers: Answers) -> list[Prompt]:
    """Returns one prompt for each answer, with its number and its rewards in the metadata."""
    return [
        Prompt(
            id=f"p{number}",
            token_ids=[4 + number // 96, 4 + number % 96] + [4] * (PROMPT_TOKENS - 2),
            metadata={"number": number, "rewards": rewards},
        )
        for number, rewards in enumerate(answers.rewards.tolist())
    ]


def prompt_number(token_ids: Sequence[int]) -> int:
    """Returns the number of the prompt with these tokens."""
    return 96 * (token_ids[0] - 4) + token_ids[1] - 4


def make_config(directory: Path, per_step: int, mean: int) -> Config:
    """Returns the configuration of GRPO with `per_step` groups a step on `RANKS` data-parallel ranks."""
    runpy.run_path(str(ROOT / "slimx/extras/quickstart/make_model.py"))["make_tokenizer"]().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            f"run.dir={directory}",
            f"model.path={directory}",
            f"rollout.prompts_per_step={per_step}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.concurrency={per_step * GROUP_SIZE}",
            "rollout.filter=rollout_stand.keep",
            "reward.function=rollout_stand.reward",
            f"rollout.sampling.max_new_tokens={LONGEST * mean}",
            f"trainer={{world_size: {RANKS}, data: {RANKS}, expert: {RANKS}, "
            f"max_tokens_per_microbatch: {2 * (LONGEST * mean + PROMPT_TOKENS)}}}",
        ],
    )

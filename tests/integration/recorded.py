"""Runs that write down every trajectory's tokens, so that an interrupted one can be held against one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.runs import steps, write_config

STEPS = 4
ROWS = 8
"""Trajectories of a step."""
UNCHECKED = {"health": {"interval": 3600, "threshold": 1}, "request_deadline": 4000}
"""Keys of `rollout` for runs that are compared bit for bit: a check is a request too, and in one batch with a rollout's
it may change the last bit of its logits."""
PPO = {"name": "ppo", "advantages": {"lam": 0.95}, "reference": True, "kl_reward_coef": 0.05, "reference_refresh": 2}
CRITIC = {"optimizer": {"lr": 5e-3}, "warmup_steps": 1}
LOSS = ("loss/policy", "optim/grad_norm", "kl/rollout", "reward/mean", "gap/mean")
"""Columns of the policy; the first step, in which the critic warms up, has no loss."""
VALUE = ("value/loss", "value/explained_variance", "critic/grad_norm", "advantage/std", "kl/reward")
"""Columns of the critic and of what it makes of the rewards."""


def recording_config(
    directory: Path,
    model: Path,
    task: Path,
    *,
    concurrency: int = 1,
    hold: int | None = None,
    workers: int = 1,
    **sections: Any,
) -> Path:
    """A PPO run of `STEPS` steps, with a critic and a reference that is refreshed, in the new `directory`: with one
    rollout at a time it is the same every time. After `hold` trajectories it waits until `directory`/go exists."""
    directory.mkdir()
    prompts = directory / "prompts.jsonl"
    with prompts.open("w") as file:
        for line in (task / "train.jsonl").open():
            prompt = json.loads(line)
            prompt["metadata"]["record"] = str(directory / "tokens.jsonl")
            if hold is not None:
                prompt["metadata"] |= {"hold": hold, "go": str(directory / "go")}
            file.write(json.dumps(prompt) + "\n")
    return write_config(
        directory,
        model,
        prompts,
        **{
            "schedule": {"steps": STEPS},
            "checkpoint": {"every": 2},
            "algorithm": PPO,
            "critic": CRITIC,
            "rollout": {
                "prompts": str(prompts),
                "prompts_per_step": ROWS // 2,
                "group_size": 2,
                "max_prompt_tokens": 64,
                "sampling": {"max_new_tokens": 4},
                "engines": [{"name": "actor", "max_total_tokens": 8192}],
                "generate": "tests.integration.hooks.recording",
                "concurrency": concurrency,
                "workers": workers,
                "max_rollouts": concurrency,  # so that one that waits for `go` holds up the others
                **UNCHECKED,
            },
            **sections,
        },
    )


def losses(directory: Path) -> dict[int, dict[str, float]]:
    """The columns of `LOSS` and `VALUE` of a run by step, without those that a step does not have."""
    rows = {step: {key: row[key] for key in (*LOSS, *VALUE) if key in row} for step, row in steps(directory).items()}
    assert {*LOSS, *VALUE} == rows[STEPS].keys()
    return rows


def recorded(directory: Path) -> list[dict[str, Any]]:
    """The trajectories that were written down, in the order in which they were complete."""
    file = directory / "tokens.jsonl"
    return [json.loads(line) for line in file.open()] if file.exists() else []


def recorded_tokens(directory: Path) -> dict[str, list[int]]:
    """Every trajectory's tokens by id; one that was generated twice (before and after an end) must be the same."""
    out: dict[str, list[int]] = {}
    for record in recorded(directory):
        assert out.setdefault(record["id"], record["tokens"]) == record["tokens"], record["id"]
    return out

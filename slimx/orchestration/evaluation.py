"""Held-out prompts, answered greedily by the engines' present weights."""

from __future__ import annotations

import asyncio

import numpy as np

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.orchestration.run import Run
from slimx.rollout.rollouts import Outcome


async def evaluate(run: Run) -> dict[str, float]:
    """Mean reward of one greedy answer per held-out prompt; {} without such prompts.

    A prompt whose evaluation fails counts as 0 and is counted in `eval/failed`; if all fail, the run stops.
    """
    if not run.eval_prompts:
        return {}
    with run.phase("eval"):
        outcomes: list[Outcome] = await run.watched(
            asyncio.gather(*(_answer(run, number, prompt) for number, prompt in enumerate(run.eval_prompts)))
        )
    failed = [outcome for outcome in outcomes if outcome.failed]
    if len(failed) == len(outcomes):
        raise SlimxError(f"all {len(failed)} evaluation prompts failed, the last one: {failed[-1].detail}")
    rewards = [0.0 if outcome.failed else outcome.group.trajectories[0].reward for outcome in outcomes]
    metrics = {"eval/accuracy": float(np.mean(rewards)), "eval/failed": float(len(failed))}
    run.record_evaluation(metrics, [outcome.group for outcome in outcomes if not outcome.failed])
    return metrics


async def _answer(run: Run, number: int, prompt: Prompt) -> Outcome:
    return await run.maker.make(prompt, group_id=f"eval{number}", number=number, evaluation=True)

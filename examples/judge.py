"""Reward hook with an LLM judge: another model reads question, reference and answer, and gives 0 to 10 points.

    slimx train FILE reward.function=examples.judge.reward

The judge is a frozen group of `rollout.engines`, whose servers slimx starts in addition to those of the policy:

    rollout:
      engines:
        - {name: actor}
        - {name: judge, frozen: true, model: /models/judge}

A judge without constraints sometimes writes no score. This one always does, because SGLang samples only text that
matches the regular expression `FORM`. `slimx.extras.rewards.judge` is a built-in hook for judges at any URL.
"""

import re

from slimx.data.records import Trajectory
from slimx.extras.rewards.judge import question
from slimx.rollout.hooks import RewardContext

ASK = """You grade answers.

Question: {question}
Reference answer: {reference}
Answer to be graded: {answer}

Reply with "Score: N" and nothing else, N from 0 (wrong) to 10 (perfect)."""
FORM = r"Score: (10|[0-9])"


async def reward(ctx: RewardContext, trajectory: Trajectory, *, judge: str = "judge") -> float:
    """Returns the judge's points divided by 10. `judge`: name of the frozen group."""
    request = ASK.format(question=question(ctx), reference=ctx.prompt.answer, answer=ctx.final_answer)
    verdict = await ctx.engines[judge].chat(
        [{"role": "user", "content": request}], temperature=0.0, max_tokens=16, regex=FORM
    )
    return int(re.fullmatch(FORM, verdict.strip())[1]) / 10

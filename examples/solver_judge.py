"""Two trained policies: `actor` answers, and `judge` writes 1 if the answer is correct, else 0.

    slimx train FILE 'policies={judge: {}}' rollout.generate=examples.solver_judge.generate \
        reward.function=examples.solver_judge.reward

Each policy is trained with its own reward (algorithm.credit=own): the solver's for a correct answer, the judge's for a
correct verdict, whether or not the solver's answer is correct.
"""

from __future__ import annotations

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """Returns the trajectory of the solver, and that of the judge, which reads the prompt and the solver's answer."""
    solver, judge = ctx.policies["actor"], ctx.policies["judge"]
    answer = solver.draft(prompt)
    answer.add_sampled(await solver.engine.generate(answer.token_ids))
    text = solver.tokenizer.decode(answer.finish().sampled_ids(), skip_special_tokens=True).strip()
    # The judge gets text, not the solver's token ids, because it may be another model.
    question = (prompt.messages or [])[-1]["content"] if prompt.messages else ""
    task = Prompt(id=prompt.id, messages=[{"role": "user", "content": f"{question}{text}="}])
    verdict = judge.draft(task, suffix="-judge")
    verdict.add_sampled(await judge.engine.generate(verdict.token_ids, turn=1))
    return [answer.finish(), verdict.finish(metadata={"answer": text})]


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns 1 for a correct answer of the solver, and for a correct verdict of the judge, else 0."""
    if trajectory.policy == "judge":
        right = trajectory.metadata["answer"] == ctx.prompt.answer
        return float(ctx.text.strip()[:1] == str(int(right)))
    return float(ctx.text.strip() == ctx.prompt.answer)

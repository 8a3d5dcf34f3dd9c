"""Two trained policies: `actor` answers, and `judge` says whether the answer is right, 1 or 0.

    slimx train FILE 'policies={judge: {}}' rollout.generate=examples.solver_judge.generate \
        reward.function=examples.solver_judge.reward

Each is trained by its own reward (algorithm.credit=own): the solver for the right answer, the judge for the right
verdict, whatever the solver said.
"""

from __future__ import annotations

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """The solver's trajectory, then the judge's, which reads the prompt and the answer."""
    solver, judge = ctx.policies["actor"], ctx.policies["judge"]
    answer = solver.draft(prompt)
    answer.add_sampled(await solver.engine.generate(answer.token_ids))
    said = solver.tokenizer.decode(answer.finish().sampled_ids(), skip_special_tokens=True).strip()
    # The judge may be another model: it gets text, not the solver's token ids.
    question = (prompt.messages or [])[-1]["content"] if prompt.messages else ""
    asked = Prompt(id=prompt.id, messages=[{"role": "user", "content": f"{question}{said}="}])
    verdict = judge.draft(asked, suffix="-judge")
    verdict.add_sampled(await judge.engine.generate(verdict.token_ids, turn=1))
    return [answer.finish(), verdict.finish(metadata={"answer": said})]


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """1 for a right answer of the solver, and for a right verdict of the judge."""
    if trajectory.policy == "judge":
        right = trajectory.metadata["answer"] == ctx.prompt.answer
        return float(ctx.text.strip()[:1] == str(int(right)))
    return float(ctx.text.strip() == ctx.prompt.answer)

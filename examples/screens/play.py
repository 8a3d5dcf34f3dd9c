"""The rewards of the stages: that of one action, and the environment in which a whole task is played."""

from __future__ import annotations

from examples.screens.phone import BACK, HOME, Phone, action
from slimx import Prompt, RewardContext, Trajectory
from slimx.environments.base import Step
from slimx.extras.rewards.images import point_in_box


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns 1.0 if the action is of the right type and a tap hits the box in the prompt's answer, else 0.0. Logs the
    share of responses that are actions as the metric `hook/format/mean`."""
    found = action(ctx.final_answer)
    ctx.log("format", float(found is not None))
    if found is None or BACK in (found, ctx.prompt.answer):
        return float(found == ctx.prompt.answer)
    return await point_in_box.reward(ctx, trajectory)


class Screens:
    """Environment of one task: answers every action with the picture of the next screen.

    The prompt's metadata contain the phone's `seed`, the task's `app` and `button`, and the first `screen`, which the
    prompt shows. The reward is 1 for the right button in the right app and 0 for any other. Text that is not an
    action changes nothing.
    """

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Starts the task. The phone does not depend on `seed`, so all rollouts of a prompt begin alike."""
        self._phone = Phone(int(prompt.metadata["seed"]))
        self._task = (str(prompt.metadata["app"]), int(prompt.metadata["button"]))
        self._screen = str(prompt.metadata["screen"])
        return ""

    async def step(self, text: str) -> Step:
        """Executes the action `text`."""
        found = action(text)
        if found == BACK:
            self._screen = HOME
        elif isinstance(found, tuple):
            touched = self._phone.touched(self._screen, found)
            if isinstance(touched, int):
                return Step(done=True, reward=float((self._screen, touched) == self._task))
            self._screen = touched or self._screen
        return Step(images=[self._phone.draw(self._screen)])

    async def close(self) -> None:
        """Ends the task; there is nothing to release."""

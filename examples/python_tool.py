"""Environment with a Python tool: the model may run programs before it answers, and the answer is graded.

    slimx train FILE rollout.generate=multi_turn \\
        rollout.options.environment=examples.python_tool.Solver reward.function=multi_turn

If a turn ends with a fenced program, the next turn is its output. The program runs in slimx's sandbox, without network
or files. Any other turn is the last one. Its reward is 1 if the answer that it marks equals the prompt's, minus a small
price per program. An unmarked answer earns nothing, because the model would learn to list numbers, or to repeat the
output of its programs.
"""

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.extras.boxes.programs.answers import marked_answer
from slimx.extras.boxes.programs.python_tool import PythonTool

ASK = "Put your answer between <answer> and </answer>."


class Solver(PythonTool):
    """`PythonTool` that grades the last turn."""

    def __init__(self, *, price: float = 0.05, **limits: float):
        """Takes `price`, which is subtracted from the reward for each program, and the limits of `PythonTool`, such as
        seconds."""
        super().__init__(**limits)
        self.price = price

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Stores the correct answer, and returns the instruction that tells the model how to mark an answer."""
        self.answer = (prompt.answer or "").strip()
        return ASK

    async def step(self, text: str) -> Step:
        """Runs the program at the end of a turn, or grades the answer if there is none."""
        step = await super().step(text)
        if not step.done:
            return step
        right = float(marked_answer(text) == self.answer)
        return Step(done=True, reward=right - self.price * self.runs, info={"runs": self.runs, "right": right})

"""An environment with a Python tool: the model may run programs before it answers, and the answer is graded.

    slimx train FILE rollout.generate=multi_turn \\
        rollout.options.environment=examples.python_tool.Solver reward.function=multi_turn

A turn that ends in a fenced program is met by what the program printed; it runs in slimx's sandbox, without network or
files. Any other turn is the last: worth 1 if what it marks as its answer is the prompt's, less a little for every
program. An answer that is only somewhere in the text earns nothing: a model would learn to list numbers, or to repeat
what its programs printed.
"""

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.extras.boxes.programs.answers import marked_answer
from slimx.extras.boxes.programs.python_tool import PythonTool

ASK = "Put your answer between <answer> and </answer>."


class Solver(PythonTool):
    """`PythonTool`, with a reward at the end."""

    def __init__(self, *, price: float = 0.05, **limits: float):
        """`price`: of one program. `limits`: of `PythonTool`, such as seconds."""
        super().__init__(**limits)
        self.price = price

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Remember the right answer, and tell the model how to give its own."""
        self.answer = (prompt.answer or "").strip()
        return ASK

    async def step(self, text: str) -> Step:
        """Run the program, or grade the answer."""
        step = await super().step(text)
        if not step.done:
            return step
        right = float(marked_answer(text) == self.answer)
        return Step(done=True, reward=right - self.price * self.runs, info={"runs": self.runs, "right": right})

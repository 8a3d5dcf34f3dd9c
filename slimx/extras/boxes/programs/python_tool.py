"""An environment with a Python tool: the model can run programs in the sandbox before it answers."""

from __future__ import annotations

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.extras.boxes.programs.answers import last_program
from slimx.extras.boxes.programs.sandbox import Limits, Sandbox


class PythonTool:
    """Environment that runs the last fenced Python block of a turn and returns its output as the next turn. A turn
    without a Python block is the answer and ends the episode."""

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512, processes: int = 8, role: str = "user"):
        """Creates the sandbox with limits for each program.

        `seconds`: wall-clock time. `memory_mib`: memory in MiB. `processes`: number of processes and threads. `role`:
        role of output turns in the chat template.
        """
        self.sandbox = Sandbox(Limits(seconds=seconds, memory_mib=memory_mib, processes=processes))
        self.role = role
        self.runs = 0

    @classmethod
    def check(cls, **options: object) -> None:
        """Raises SlimxError if the sandbox does not isolate programs on this machine."""
        cls(**options).sandbox.check()  # type: ignore[arg-type]  # options are checked against __init__ before

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Returns "", because the prompt is the only observation before the first turn."""
        return ""

    async def step(self, text: str) -> Step:
        """Runs the Python program in the model's turn `text`; ends the episode if the turn contains none."""
        program = last_program(text)
        if program is None:
            return Step(done=True, info={"runs": self.runs})
        self.runs += 1
        result = await self.sandbox.run(program)
        output = (result.stdout + result.stderr).strip() or "(no output)"
        if result.ended != "exit":
            output += f"\n(killed: over the limit of {result.ended})"
        return Step(text=f"Output:\n{output}", role=self.role, tool_calls=1)

    async def close(self) -> None:
        """Does nothing, because no program outlives its turn."""

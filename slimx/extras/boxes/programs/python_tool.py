"""An environment with a Python tool: the model may run programs in the sandbox before it answers."""

from __future__ import annotations

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.extras.boxes.programs.answers import last_program
from slimx.extras.boxes.programs.sandbox import Limits, Sandbox


class PythonTool:
    """A turn whose last fenced block is Python is run, and its output is the next turn; a turn without one is the
    answer."""

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512, processes: int = 8, role: str = "user"):
        """Limits of one program. `role`: of the turns that hold output, as the model's chat template knows it."""
        self.sandbox = Sandbox(Limits(seconds=seconds, memory_mib=memory_mib, processes=processes))
        self.role = role
        self.runs = 0

    @classmethod
    def check(cls, **options: object) -> None:
        """Refuse a run on a machine where the sandbox does not hold (SlimxError)."""
        cls(**options).sandbox.check()  # type: ignore[arg-type]

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """The prompt says it all."""
        return ""

    async def step(self, text: str) -> Step:
        """Run the program, if there is one."""
        program = last_program(text)
        if program is None:
            return Step(done=True, info={"runs": self.runs})
        self.runs += 1
        ran = await self.sandbox.run(program)
        output = (ran.stdout + ran.stderr).strip() or "(no output)"
        ending = "" if ran.ended == "exit" else f"\n(killed: over the limit of {ran.ended})"
        return Step(text=f"Output:\n{output}{ending}", role=self.role, tool_calls=1)

    async def close(self) -> None:
        """There is nothing to end."""

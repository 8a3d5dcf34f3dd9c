"""A taskset of verifiers, as its users write them: sums, with a tool that adds and a rubric of two parts."""

import verifiers.v1 as vf

__all__ = ["AddingTaskset"]


class AddingData(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None  # the model calls add, not adder_add

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class AddingTask(vf.Task[AddingData]):
    @vf.reward(weight=2.0)
    async def right(self, task: AddingData, trace: vf.Trace) -> float:
        return float(task.answer in str(trace.assistant_messages[-1].content))

    @vf.reward
    async def by_tool(self, trace: vf.Trace) -> float:
        return float(any(message.tool_calls for message in trace.assistant_messages))

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]


class AddingTaskset(vf.Taskset[AddingTask]):
    def load(self):
        for number in range(3):
            data = AddingData(prompt=f"{number}+1=", system_prompt="Add.", answer=str(number + 1))
            yield AddingTask(data, self.config.task)


if __name__ == "__main__":  # verifiers starts the server of a toolset by running the toolset's module
    Adder.run()

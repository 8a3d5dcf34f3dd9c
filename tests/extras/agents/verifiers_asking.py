"""An environment of verifiers that is its agent's user: it asks again, and judges the whole exchange."""

import verifiers.v1 as vf

__all__ = ["AskingEnv", "AskingTaskset"]


class AskingData(vf.TaskData):
    answer: str


class AskingTask(vf.Task[AskingData]):
    pass


class AskingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class AskingEnv(vf.Env[AskingConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            segment = await interaction.turn("Sure?")
        interaction.trace.record_reward("kept", float(segment.last_reply == task.data.answer), 0.5)


class AskingTaskset(vf.Taskset[AskingTask]):
    def load(self):
        yield AskingTask(AskingData(prompt="1+1=", answer="2"), self.config.task)

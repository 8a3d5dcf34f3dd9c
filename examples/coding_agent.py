"""Coding agent for long tasks, written for OpenAI's API. It works in a terminal's sandbox, gives parts of the work to
sub-agents, and continues from a summary when its conversation has become long.

    slimx train configs/moe/glm-4.5-air-agents.yaml

The tasks are those of the terminal (docs/sandboxes.md). One rollout returns several trajectories, which all get the
reward of the task's tests: one for each part of the main conversation between two summaries, whose last turn is the
summary, and one for each sub-agent.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from examples.openai_agent import shared_client
from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.extras.boxes.terminal.toolbox import Terminal
from slimx.rewards.needs import checked_by, checks_prompts
from slimx.rollout.hooks import RewardContext

LIMITS = {"context_length_exceeded", "request_limit_exceeded", "token_budget_exceeded"}
"""Codes of the requests that a session's limits refuse (`rollout.options`): the agent then ends, and is judged."""
DELEGATE = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": (
            "Give a part of the work to a sub-agent, such as finding the code that a change concerns. It works in the "
            "same sandbox with the same tools, but sees only your text. You get its report."
        ),
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string", "description": "The task, with all that is needed for it."}},
            "required": ["task"],
        },
    },
}
COUNTS = ("compactions", "sub_agents", "prompt_tokens", "cached_tokens")
SUMMARIZE = (
    "This conversation will be removed. Write down, without calling a tool, what is needed to continue: what you "
    "found and changed, in which files, and what remains to be done."
)
CONTINUE = "\n\nYou have worked on this before, and wrote down:\n"


def check(*, toolbox_options: dict[str, Any] | None = None, **limits: float) -> None:
    """Raises SlimxError for unusable sandbox options, or a limit that is not positive. Called before the run starts."""
    for name, value in limits.items():
        if value <= 0:
            key = f"rollout.options.agent_options.{name}"
            text = f"{key} must be greater than 0, not {value!r}; correct or remove {key}"
            raise SlimxError(text, code="coding_agent.limit", about=key)
    Terminal.check(**(toolbox_options or {}))


def check_prompts(prompts: Iterable[Prompt], *, toolbox_options: dict[str, Any] | None = None, **_: object) -> None:
    """Checks the tasks of all prompts, and tries the sandbox of the first. Raises SlimxError that names the prompt."""
    Terminal.check_prompts(prompts, **(toolbox_options or {}))


@checks_prompts(check_prompts)
@checked_by(check)
async def solve(
    base_url: str,
    prompt: Prompt,
    *,
    toolbox_options: dict[str, Any] | None = None,
    compact_at: int = 90_000,
    max_turns: int = 200,
    sub_turns: int = 40,
    max_result: int = 16_384,
    timeout: float = 3600.0,
) -> dict[str, Any]:
    """Runs the agent on the prompt's task and returns the verdict of its tests.

    `toolbox_options`: options of the terminal. `compact_at`: length of the main conversation in tokens, from which it
    is replaced by a summary; below the context, it must leave room for a turn, its results and the summary.
    `max_turns`, `sub_turns`: maximum numbers of turns of the main agent, over all its conversations, and of each
    sub-agent. `max_result`: maximum length in characters of a tool's result or a sub-agent's report. `timeout`: seconds
    after which the client would send a request again.

    The result has `tests` (1.0 or 0.0), `ended` (done, turns, length, or one of LIMITS), `compactions`, `sub_agents`,
    and the sums over all requests of `prompt_tokens` and of those that came from the engine's prefix cache,
    `cached_tokens`. Raises ToolsLost if the sandbox is lost, which drops the rollout's group.
    """
    terminal = Terminal(**(toolbox_options or {}))
    client = shared_client().with_options(base_url=base_url, timeout=timeout)
    try:
        tools = await terminal.open(prompt, 0)
        work = _Work(client, terminal, tools, compact_at, sub_turns, max_result)
        ended, _ = await work.talk(list(prompt.messages or []), max_turns, main=True)
        return {**await terminal.judge([]), "ended": ended, **work.counts}
    finally:
        await asyncio.shield(terminal.close())


async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """Returns the verdict of the task's tests, the same for all trajectories of a rollout. There is none if the sandbox
    was lost after a limit was reached, which counts as failed."""
    result = trajectory.metadata["result"]
    return {"tests": result["tests"] if result is not None else 0.0}


@dataclass(slots=True)
class _Work:
    """One rollout's work in its sandbox, by the main agent and its sub-agents."""

    client: AsyncOpenAI
    terminal: Terminal
    tools: list[dict[str, Any]]
    """Tools of the terminal, which every agent has."""
    compact_at: int
    sub_turns: int
    max_result: int
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))

    async def talk(self, messages: list[Any], max_turns: int, *, main: bool) -> tuple[str, str]:
        """Samples turns and makes their calls, until a turn has no call or a limit is reached. Returns the reason for
        the end, as in the result of `solve`, and the text of the last turn.

        `messages`: beginning of the conversation. `main`: True for the main agent, which may delegate and summarizes.
        """
        tools = [*self.tools, DELEGATE] if main else self.tools
        task = list(messages)
        text = ""
        try:
            for _ in range(max_turns):
                choice, tokens = await self._ask(messages, tools)
                text = choice.message.content or ""
                if choice.finish_reason == "length":
                    return "length", text
                if not choice.message.tool_calls:
                    return "done", text
                messages.append(choice.message)
                for call in choice.message.tool_calls:
                    result = await self._result(call.function.name, call.function.arguments, tools)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": self._cut(result)})
                if main and tokens >= self.compact_at:
                    # The tools stay, because the chat template renders them at the beginning: without them, the whole
                    # conversation would be another one.
                    request = [*messages, {"role": "user", "content": SUMMARIZE}]
                    choice, _ = await self._ask(request, tools)
                    messages = self._resumed(task, choice.message.content or "")
                    self.counts["compactions"] += 1
        except BadRequestError as error:
            if error.code not in LIMITS:
                raise
            return error.code, text
        return "turns", text

    async def _ask(self, messages: list[Any], tools: list[dict[str, Any]]) -> tuple[Any, int]:
        """Samples a turn. Returns it, and the length of the conversation with it in tokens."""
        answer = await self.client.chat.completions.create(model="policy", messages=messages, tools=tools)  # type: ignore[arg-type]
        used = answer.usage
        assert used is not None and used.prompt_tokens_details is not None  # slimx's server counts always
        self.counts["prompt_tokens"] += used.prompt_tokens
        self.counts["cached_tokens"] += used.prompt_tokens_details.cached_tokens or 0
        return answer.choices[0], used.total_tokens

    def _resumed(self, task: list[Any], summary: str) -> list[Any]:
        """Returns the beginning of a conversation that continues from a summary of the one before."""
        *before, last = task
        return [*before, {**last, "content": last["content"] + CONTINUE + summary}]

    async def _result(self, name: str, arguments: str, tools: list[dict[str, Any]]) -> str:
        if name not in {tool["function"]["name"] for tool in tools}:
            return f"There is no tool {name}."
        try:
            values = json.loads(arguments)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            return "The arguments are not a JSON object."
        if name != "delegate":
            return (await self.terminal.call(name, values)).text
        if not isinstance(values.get("task"), str):
            return "delegate takes exactly this string: task."
        self.counts["sub_agents"] += 1
        ended, text = await self.talk([{"role": "user", "content": values["task"]}], self.sub_turns, main=False)
        return text if ended == "done" else f"(The sub-agent did not finish: {ended}. Its last turn:)\n{text}"

    def _cut(self, text: str) -> str:
        rest = len(text) - self.max_result
        return text if rest <= 0 else f"{text[: self.max_result]}\n({rest} characters left out)"

"""The same rollouts in four ways, for benchmarks/rollout_waiting.py: engine calls and waits for a tool by turns.

hook    a generate hook that calls the engine and waits
tools   slimx.extras.agents.tools with a toolbox that waits
agent   slimx.extras.agents.agent: a client of the run's chat completions that waits
plain   asyncio and aiohttp alone: the same requests and waits, and no slimx"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from slimx.data.records import Prompt, Trajectory
from slimx.extras.agents import agent, tools
from slimx.extras.agents.toolbox import ToolResult
from slimx.rollout.hooks import RolloutContext

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<assistant>{{ m.content }}<end>\n"
    "{% else %}<user>{{ m.role + ': ' + m.content }}<end>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
FIRST = 1000
"""The first id of a character."""
ANSWER, RESULT = 64, 128
"""Tokens of an answer and of a tool's result."""
SHORTEST, LONGEST = 0.1, 30.0
"""Seconds for which a tool is waited for: evenly distributed between these."""


def tokenizer() -> Any:
    """One token a character, with ids as large as those of real vocabularies, whose numbers Python does not share."""
    specials = ("<user>", "<assistant>", "<end>")
    written = (*specials, "\n", *(chr(code) for code in range(0x20, 0x7F)))
    vocabulary = {f"<{number}>": number for number in range(FIRST)} | {c: FIRST + n for n, c in enumerate(written)}
    out = Tokenizer(WordLevel(vocabulary))
    out.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    out.decoder = Fuse()
    out.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=out, eos_token="<end>", chat_template=TEMPLATE)


def answer_ids(of: Any) -> list[int]:
    """An answer with a call, `ANSWER` tokens."""
    return of(CALL.rjust(ANSWER - 1, ".") + "<end>", add_special_tokens=False).input_ids


@dataclass(slots=True)
class Plan:
    """The shape of every rollout, and who waits."""

    turns: int = 4
    scale: float = 1.0
    """Factor of the waits."""
    hold: bool = False
    """Wait in the last turn until the rollout is ended from outside."""
    waiting: int = 0
    """Rollouts that wait for a tool."""
    held: int = 0
    """Rollouts that wait in the last turn, if they are held there."""
    turned: int = 0
    """Turns that were completed."""

    def waits(self, seed: int) -> Callable[[], Awaitable[None]]:
        """The waits of one rollout, one after the other."""
        draws, turn = random.Random(seed), 0  # not kept by `wait`: it takes 2.5 kB
        seconds = [self.scale * draws.uniform(SHORTEST, LONGEST) for _ in range(self.turns)]

        async def wait() -> None:
            nonlocal turn
            turn += 1
            last = self.hold and turn == self.turns
            self.waiting += 1
            self.held += last
            try:
                if last:
                    await asyncio.get_running_loop().create_future()
                await asyncio.sleep(seconds[turn - 1])
            finally:
                self.waiting -= 1
                self.held -= last
            self.turned += 1

        return wait


PLAN = Plan()
"""The one of this process: hooks are named by dotted paths, and find it here."""


def result_text() -> str:
    """A tool's result; a new object each time, as it would be of a real tool."""
    return "r" * (RESULT - 11)  # the template adds so many


async def hook(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Call and wait by turns."""
    draft, wait = ctx.draft(prompt), PLAN.waits(ctx.seed)
    for turn in range(PLAN.turns):
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=turn))
        await wait()
        if turn + 1 < PLAN.turns:
            draft.add_inserted(ctx.turn(result_text(), after=draft.token_ids, role="tool"))
    return draft.finish()


class Toolbox:
    """One tool, which takes its time."""

    async def open(self, prompt: Prompt, seed: int) -> list[dict[str, Any]]:
        self._wait = PLAN.waits(seed)
        return [TOOL]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        await self._wait()
        return ToolResult(text=result_text())

    async def judge(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


async def tool_rollout(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """slimx.extras.agents.tools as it is."""
    return await tools.generate(
        ctx, prompt, toolbox="waiting_sides.Toolbox", max_turns=PLAN.turns, call_deadline=86400.0
    )


CLIENT: list[aiohttp.ClientSession] = []
"""The one HTTP client of all agents of this process."""


async def solve(base_url: str, prompt: Prompt) -> None:
    """An agent that asks, waits and asks again."""
    messages, wait = list(prompt.messages or []), PLAN.waits(hash(base_url))
    for _ in range(PLAN.turns):
        asked = {"model": "policy", "messages": messages}
        async with CLIENT[0].post(f"{base_url}/chat/completions", json=asked) as response:
            response.raise_for_status()
            said = (await response.json())["choices"][0]["message"]
        await wait()
        messages = [*messages, said, {"role": "tool", "tool_call_id": "1", "content": result_text()}]


async def agent_rollout(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """slimx.extras.agents.agent as it is."""
    return await agent.generate(ctx, prompt, agent="waiting_sides.solve")


HOOKS = {"hook": hook, "tools": tool_rollout, "agent": agent_rollout}


async def plain(
    session: aiohttp.ClientSession,
    places: asyncio.Semaphore,
    url: str,
    prompt: Sequence[int],
    result: Sequence[int],
    seed: int,
) -> None:
    """A rollout by asyncio and aiohttp alone."""
    ids, logprobs, wait = list(prompt), [], PLAN.waits(seed)
    for turn in range(PLAN.turns):
        sampling = {"max_new_tokens": ANSWER, "temperature": 1.0, "sampling_seed": seed + turn}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": False}
        headers = {"Content-Type": "application/json"}
        async with (
            places,
            session.post(f"{url}/generate", data=json.dumps(body), headers=headers) as response,
        ):
            response.raise_for_status()
            sampled = json.loads(await response.read())["meta_info"]["output_token_logprobs"]
        ids = [*ids, *(entry[1] for entry in sampled)]
        logprobs += [entry[0] for entry in sampled]
        await wait()
        ids = [*ids, *result]

"""The same rollouts in four ways, for benchmarks/rollout_waiting.py: engine calls and waits for a tool by turns.

hook    a generate hook that calls the engine and waits
tools   slimx.extras.agents.tools with a toolbox that waits
agent   slimx.extras.agents.agent: a client of the run's chat completions that waits
plain   asyncio and aiohttp alone: the same requests and waits, and no slimx

`ClientStand` runs the agents of `agent` without slimx: what they cost themselves."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
"""Token id of the first character."""
ANSWER, RESULT = 64, 128
"""Tokens of an answer and of a tool's result."""
SHORTEST, LONGEST = 0.1, 30.0
"""Shortest and longest wait for a tool in seconds; waits are uniformly distributed between them."""


def tokenizer() -> Any:
    """Returns a tokenizer with one token per character. Its ids are as large as those of real vocabularies, because
    Python shares small integers."""
    specials = ("<user>", "<assistant>", "<end>")
    written = (*specials, "\n", *(chr(code) for code in range(0x20, 0x7F)))
    vocabulary = {f"<{number}>": number for number in range(FIRST)} | {c: FIRST + n for n, c in enumerate(written)}
    out = Tokenizer(WordLevel(vocabulary))
    out.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    out.decoder = Fuse()
    out.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=out, eos_token="<end>", chat_template=TEMPLATE)


def answer_ids(of: Any) -> list[int]:
    """Returns an answer of `ANSWER` tokens that ends with a tool call."""
    return of(CALL.rjust(ANSWER - 1, ".") + "<end>", add_special_tokens=False).input_ids


@dataclass(slots=True)
class Plan:
    """The shape of every rollout, and counters of waiting ones."""

    turns: int = 4
    scale: float = 1.0
    """Factor of the waits."""
    hold: bool = False
    """True to wait in the last turn until the rollout is cancelled."""
    waiting: int = 0
    """Number of rollouts that wait for a tool."""
    holding: int = 0
    """Number of rollouts that wait in the last turn because of `hold`."""
    turned: int = 0
    """Number of completed turns."""

    def waits(self, seed: int) -> Callable[[], Awaitable[None]]:
        """Returns a function that waits as the next tool of one rollout does."""
        draws, turn = random.Random(seed), 0  # not kept by `wait`: it takes 2.5 kB
        seconds = [self.scale * draws.uniform(SHORTEST, LONGEST) for _ in range(self.turns)]

        async def wait() -> None:
            nonlocal turn
            turn += 1
            last = self.hold and turn == self.turns
            self.waiting += 1
            self.holding += last
            try:
                if last:
                    await asyncio.get_running_loop().create_future()
                await asyncio.sleep(seconds[turn - 1])
            finally:
                self.waiting -= 1
                self.holding -= last
            self.turned += 1

        return wait


PLAN = Plan()
"""The plan of this process. Hooks are named by dotted paths, and find it here."""


def result_text() -> str:
    """Returns a tool's result; a new object each time, as from a real tool."""
    return "r" * (RESULT - 11)  # the template adds so many


async def hook(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Calls the engine and waits, alternately."""
    draft, wait = ctx.draft(prompt), PLAN.waits(ctx.seed)
    for turn in range(PLAN.turns):
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=turn))
        await wait()
        if turn + 1 < PLAN.turns:
            draft.add_inserted(ctx.turn(result_text(), after=draft.token_ids, role="tool"))
    return draft.finish()


class Toolbox:
    """A toolbox with one slow tool."""

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
    """Generates by slimx.extras.agents.tools."""
    return await tools.generate(
        ctx, prompt, toolbox="waiting_sides.Toolbox", max_turns=PLAN.turns, call_deadline=86400.0
    )


CLIENT: list[aiohttp.ClientSession] = []
"""The only HTTP client of all agents of this process."""


async def solve(base_url: str, prompt: Prompt) -> None:
    """Runs an agent that sends a request, waits, and sends the next one."""
    messages, wait = list(prompt.messages or []), PLAN.waits(hash(base_url))
    for _ in range(PLAN.turns):
        body = {"model": "policy", "messages": messages}
        async with CLIENT[0].post(f"{base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            message = (await response.json())["choices"][0]["message"]
        await wait()
        messages = [*messages, message, {"role": "tool", "tool_call_id": "1", "content": result_text()}]


async def agent_rollout(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """Generates by slimx.extras.agents.agent."""
    return await agent.generate(ctx, prompt, agent="waiting_sides.solve")


class ClientStand:
    """The agents of `agent_rollout`, one task per agent in flight, at a server of canned answers."""

    def __init__(self, url: str, count: int, prompt: int) -> None:
        self.url, self.count, self.rollouts = url, count, 0
        self._prompt = Prompt(id="p", messages=[{"role": "user", "content": "q" * (prompt - 10)}])

    async def go_on(self) -> None:
        """Runs agent after agent."""
        await asyncio.gather(*(self._work(number) for number in range(self.count)))

    async def _work(self, number: int) -> None:
        again = 0
        while True:
            await solve(f"{self.url}/{number}-{again}/v1", self._prompt)
            self.rollouts += 1
            again += 1

    async def stop(self) -> None: ...

    async def __aenter__(self) -> ClientStand:
        CLIENT[:] = [aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))]
        return self

    async def __aexit__(self, *_: object) -> None:
        await CLIENT[0].close()


def canned_answer() -> bytes:
    """Returns the body of a chat completion as the proxy answers the agents."""
    text = CALL.rjust(ANSWER - 1, ".")
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1000, "completion_tokens": ANSWER, "total_tokens": 1000 + ANSWER}
    usage_details = {"prompt_tokens_details": {"cached_tokens": 0}}
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy"}
    return json.dumps(head | {"choices": [choice], "usage": usage | usage_details}).encode()


HOOKS = {"hook": hook, "tools": tool_rollout, "agent": agent_rollout}
BESIDE = ("client", "plain")
"""Sides without slimx."""


async def plain(
    session: aiohttp.ClientSession,
    places: asyncio.Semaphore,
    url: str,
    prompt: Sequence[int],
    result: Sequence[int],
    seed: int,
) -> None:
    """Makes a rollout with asyncio and aiohttp alone."""
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


def above_plain(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each side of slimx with its CPU time per request above that of plain asyncio, and above that
    of the agents' own client as well. `rows`: the figures of the throughput part."""
    ms = {side: median(row["cpu_ms_request"] for row in rows if row["side"] == side) for side in (*HOOKS, *BESIDE)}
    lines = []
    for side in HOOKS:
        above = ms[side] - ms["plain"]
        text = f"CPU ms per request above plain ({ms['plain']:.2f}): {side} {above:.2f}"
        if side == "agent":
            text += f", of which the agents' client {ms['client']:.2f} and slimx {above - ms['client']:.2f}"
        lines.append(text)
    return [line for line in lines if "nan" not in line]


def median(of: Iterable[float]) -> float:
    """Returns the median; NaN of nothing."""
    found = list(of)
    return statistics.median(found) if found else float("nan")

"""The generate hook of tools that answer over a protocol: the model calls, reads the results, and goes on.

rollout:
  generate: tools
  options:
    toolbox: mcp
    toolbox_options: {servers: {search: {url: "http://127.0.0.1:8000/mcp"}}}

The tools go into the chat template, calls are found as those of agents are (`proxy/tool_calls.py`), and
results come back as turns of role tool.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimx.data.chat.tokens import encode_turns
from slimx.data.records import Prompt, Trajectory
from slimx.data.whole import Json
from slimx.dotted import imported
from slimx.errors import SlimxError, raised
from slimx.extras.agents.proxy.answer import AnswerReader, written
from slimx.extras.agents.proxy.tool_calls import ToolCall, find_parser
from slimx.extras.agents.toolbox import Toolbox, ToolResult, ToolsLost
from slimx.rewards.needs import checked_by, checks_prompts
from slimx.rollout.draft import Draft
from slimx.rollout.hooks import GivenUp, RewardContext, RolloutContext

TOOLBOXES = "slimx.toolboxes"
"""Group of entry points: toolboxes by the names that a configuration has for them."""
UNREADABLE = "The tool call could not be read. Write it again, as one JSON object with name and arguments."
CLOSE_S = 25.0
"""Seconds for a toolbox to end, which may have processes to end."""
OPEN_S, CALL_S = 60.0, 60.0
"""Seconds for a toolbox to be open, and for one call, unless the options say otherwise."""
MAX_DEADLINES = 2
"""Calls of a rollout that may run past their deadline; with the last of them the rollout is given up."""


def check(*, toolbox: str, toolbox_options: Json | None = None, tool_parser: str = "hermes", **limits: Any) -> None:
    """Refuse tools that cannot be made, a parser that nobody knows, and limits that are no positive numbers."""
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None) or (value is not None and value <= 0):
            raise SlimxError(
                f"rollout.options.{name} is {value!r}; give a number above 0",
                code="tools.limit",
                about=f"rollout.options.{name}",
            )
    kind = imported("rollout.options.toolbox", toolbox, TOOLBOXES)
    missing = [name for name in ("open", "call", "judge", "close") if not callable(getattr(kind, name, None))]
    if missing:
        raise SlimxError(
            f"rollout.options.toolbox: {toolbox} has no {missing[0]}; a toolbox has open, call, judge and close "
            "(slimx.extras.agents.toolbox)",
            code="tools.methods",
            about="rollout.options.toolbox",
        )
    try:
        getattr(kind, "check", kind)(**(toolbox_options or {}))
    except TypeError as error:
        raise SlimxError(
            f"rollout.options.toolbox_options: {toolbox} refuses them ({error})",
            code="tools.option",
            about="rollout.options.toolbox_options",
        ) from error
    find_parser(tool_parser, "")


def check_prompts(
    prompts: Iterable[Prompt],
    *,
    toolbox: str,
    toolbox_options: Json | None = None,
    open_deadline: float = OPEN_S,
    call_deadline: float = CALL_S,
    **_: Any,
) -> None:
    """Have the toolbox refuse prompts that it cannot begin, by its class method `check_prompts`, if it has one, and
    refuse deadlines that are no longer than what it says by `needs_seconds`."""
    kind, options, prompts = (
        imported("rollout.options.toolbox", toolbox, TOOLBOXES),
        toolbox_options or {},
        list(prompts),
    )
    if (check := getattr(kind, "check_prompts", None)) is not None:
        check(prompts, **options)
    if (needs := getattr(kind, "needs_seconds", None)) is not None:
        given = {"open_deadline": open_deadline, "call_deadline": call_deadline}
        for (name, seconds), needed in zip(given.items(), needs(prompts, **options), strict=True):
            if seconds < needed:
                raise SlimxError(
                    f"rollout.options.{name} is {seconds:g} s, and {toolbox} may take {needed:g} s for these prompts, "
                    "after which their rollouts would be given up; raise it",
                    code="tools.limit",
                    about=f"rollout.options.{name}",
                )


@checks_prompts(check_prompts)
@checked_by(check)
async def generate(
    ctx: RolloutContext,
    prompt: Prompt,
    *,
    toolbox: str,
    toolbox_options: Json | None = None,
    tool_parser: str = "hermes",
    max_turns: int = 16,
    max_calls: int = 64,
    max_unreadable: int = 3,
    max_result: int = 16_384,
    max_context: int | None = None,
    open_deadline: float = OPEN_S,
    call_deadline: float = CALL_S,
) -> Trajectory:
    """One trajectory: the model's turns are trained, what tools say is not.

    `tool_parser`: as in `agent.py`. `max_turns` of the model, `max_calls` of tools, `max_unreadable` turns in a row
    whose call cannot be read, and `max_context` tokens (None: what can be trained) end a rollout, which is trained as
    far as it came. `max_result`: characters of one result that the model reads. `open_deadline` and `call_deadline` are
    seconds; a call past its deadline is told to the model, a second one ends the rollout.

    Metadata: `ended` (done, turns, calls, unreadable, context or length), `turns`, `tool_calls`, `tool_errors` (by
    code: unknown_tool, bad_arguments, deadline, unjudged, and the toolbox's own), `judged` (parts of the toolbox's
    reward), and `unjudged`, why the toolbox had no verdict, where it says so. Logs tool_calls, tool_errors,
    unreadable_calls and left_out.

    Raises GivenUp: "tools lost" where their server has died or cannot be reached, "tools deadline" where it hangs,
    "context" where the prompt and its tools leave no room for a turn."""
    box: Toolbox = imported("rollout.options.toolbox", toolbox, TOOLBOXES)(**(toolbox_options or {}))
    name = f"{toolbox} of rollout {ctx.group_id}/{ctx.index}"
    reader = AnswerReader(ctx.tokenizer, find_parser(tool_parser, ctx.address, ctx.headers))
    trained = ctx.proxy.context if ctx.proxy is not None else None
    context = min((each for each in (max_context, trained) if each is not None), default=None)
    try:
        tools = await _within(box.open(prompt, ctx.seed), open_deadline, f"{name}: it was not open")
        shown = [*(prompt.tools or []), *tools]
        draft = ctx.draft(replace(prompt, tools=shown or None))
        talk = _Talk(
            ctx, box, reader, draft, shown, name, context, max_calls, max_unreadable, max_result, call_deadline
        )
        ended = await talk.run(max_turns, {each["function"]["name"] for each in tools})
        judged = await _within(box.judge(talk.messages), call_deadline, f"{name}: it had not judged")
    except ToolsLost as error:
        raise GivenUp("tools lost", f"{name}: {error}") from error
    finally:
        await asyncio.shield(_end(box))
    unjudged = getattr(box, "unjudged", None)
    if unjudged is not None:
        talk.errors["unjudged"] += 1
    ctx.add("tool_calls", talk.calls)
    ctx.add("tool_errors", talk.errors.total())
    ctx.add("unreadable_calls", talk.unreadable)
    ctx.add("left_out", talk.left_out)
    told: Json = {
        "ended": ended,
        "turns": draft.turn,
        "tool_calls": talk.calls,
        "tool_errors": dict(sorted(talk.errors.items())),
    }
    if unjudged is not None:
        told["unjudged"] = unjudged
    return draft.finish(metadata=told | {"judged": judged})


async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """The parts that the toolbox gave. Raises SlimxError where it gives none."""
    judged = trajectory.metadata["judged"]
    if not judged:
        raise SlimxError(
            "rollout.options.toolbox gives no rewards; name another function in reward.function",
            code="tools.reward",
            about="reward.function",
        )
    return judged


@dataclass(slots=True)
class _Talk:
    """The turns of one rollout."""

    ctx: RolloutContext
    box: Toolbox
    reader: AnswerReader
    draft: Draft
    shown: list[Json]
    """Tools in the chat template."""
    name: str
    context: int | None
    max_calls: int
    max_unreadable: int
    max_result: int
    call_s: float
    messages: list[Json] = field(default_factory=list)
    calls: int = 0
    unreadable: int = 0
    left_out: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    async def run(self, max_turns: int, callable_: set[str]) -> str:
        """Take turns until there is nothing to call, or a limit is reached; returns which."""
        in_a_row = 0
        for turn in range(max_turns):
            sampling = self._sampling()
            if sampling is None:
                if not turn:
                    used = len(self.draft.token_ids)
                    text = f"{self.name}: the prompt and its tools have {used} tokens of {self.context}"
                    raise GivenUp("context", text)
                return "context"
            completion = await self.ctx.engine.generate(self.draft.token_ids, sampling, turn=turn)
            before = self.draft.token_ids
            self.draft.add_sampled(completion)
            ids = completion.token_ids.tolist()
            if completion.finish_reason != "stop":
                self.messages.append({"role": "assistant", "content": self.reader.text(ids, ())})
                return "length"
            found = await self.reader.calls(ids, self.shown, after=before)
            if not found.calls:
                self.messages.append({"role": "assistant", "content": self.reader.text(ids, ())})
                if not found.attempted:
                    return "done"
                self.unreadable += 1
                in_a_row += 1
                if in_a_row >= self.max_unreadable:
                    return "unreadable"
                # No tool has answered: templates that know the calls of results have none to show this with.
                self._insert([{"role": "user", "content": UNREADABLE}])
                continue
            in_a_row = 0
            del before, completion, ids  # thousands of rollouts wait for their tools, and a list takes 40 bytes a token
            calls = written(found.calls, turn)
            self.messages.append({"role": "assistant", "content": found.text, "tool_calls": calls})
            if self.calls + len(calls) > self.max_calls:
                return "calls"
            results = [
                await self._answered(call, each["id"], callable_) for call, each in zip(found.calls, calls, strict=True)
            ]
            self._insert(results, calls)
        return "turns"

    def _sampling(self) -> Json | None:
        """Parameters of the next turn; None where the context has no room for it."""
        if self.context is None:
            return {}
        room = self.context - len(self.draft.token_ids)
        return {"max_new_tokens": min(room, self.ctx.engine.sampling["max_new_tokens"])} if room > 0 else None

    def _insert(self, turns: Sequence[Json], calls: Sequence[Json] = ()) -> None:
        """Insert turns behind the model's, which made `calls`."""
        self.messages += [dict(each) for each in turns]
        after = self.draft.token_ids
        self.draft.add_inserted(encode_turns(self.ctx.tokenizer, turns, after=after, tools=self.shown, calls=calls))

    async def _answered(self, call: ToolCall, id: str, callable_: set[str]) -> Json:
        """The turn that holds the result of a call."""
        self.calls += 1
        result = await self._result(call, callable_)
        self.left_out += result.left_out
        if result.error is not None:
            self.errors[result.error] += 1
        text, most = result.text, self.max_result
        if len(text) > most:
            text = f"{text[:most]}\n({len(text) - most} characters left out)"
        return {"role": "tool", "content": text, "name": call.name, "tool_call_id": id}

    async def _result(self, call: ToolCall, callable_: set[str]) -> ToolResult:
        if call.name not in callable_:
            known = ", ".join(sorted(callable_)) or "none"
            return ToolResult(text=f"There is no tool {call.name}. Tools: {known}.", error="unknown_tool")
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolResult(text="The arguments are no JSON object.", error="bad_arguments")
        seconds = self.call_s
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self.box.call(call.name, arguments)
        except RecursionError:
            return ToolResult(text="The arguments are nested too deeply.", error="bad_arguments")
        except TimeoutError:
            if not limit.expired():
                raise
        if self.errors["deadline"] + 1 >= MAX_DEADLINES:
            raise GivenUp(
                "tools deadline", f"{self.name}: {call.name} took longer than {seconds:g} s for the second time"
            )
        return ToolResult(text=f"The tool took longer than {seconds:g} seconds.", error="deadline")


async def _within[T](call: Any, seconds: float, what: str) -> T:
    """The result of a call. Raises GivenUp past its deadline."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise GivenUp("tools deadline", f"{what} after {seconds:g} s") from None


async def _end(box: Toolbox) -> None:
    """Close a toolbox. Raises GivenUp for one that does not end; its server may still be there."""
    try:
        await _within(box.close(), CLOSE_S, "tools were not closed")
    except GivenUp:
        raise
    except Exception as error:
        raise GivenUp("tools lost", f"tools could not be closed: {raised(error)}") from error

"""The generate hook `tools`: the model calls tools, reads the results, and continues.

rollout:
  generate: tools
  options:
    toolbox: mcp
    toolbox_options: {servers: {search: {url: "http://127.0.0.1:8000/mcp"}}}

The chat template lists the tools in the prompt, calls are parsed like those of agents (`proxy/tool_calls.py`), and
results become turns of role tool.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from slimx.data.chat.tokens import PromptIds, encode_turns
from slimx.data.records import Prompt, Trajectory
from slimx.dotted import imported
from slimx.errors import SlimxError, raised
from slimx.extras.agents.proxy.answer import AnswerReader, message_calls
from slimx.extras.agents.proxy.tool_calls import ToolCall, find_parser
from slimx.extras.agents.toolbox import Toolbox, ToolResult, ToolsLost
from slimx.extras.vision.prompts.prepare import ImagePromptIds
from slimx.json_types import Json
from slimx.rewards.needs import checked_by, checks_prompts
from slimx.rollout.draft import Draft
from slimx.rollout.hooks import GivenUp, RewardContext, RolloutContext

TOOLBOXES = "slimx.toolboxes"
"""Entry point group that registers toolboxes under short names for `rollout.options.toolbox`."""
UNREADABLE = "The tool call could not be read. Write it again, as one JSON object with name and arguments."
UNSEEN = "(an image, which cannot be shown)"
CLOSE_S = 25.0
"""Deadline in seconds for closing a toolbox, which may have to stop processes."""
OPEN_S = 60.0
"""Default deadline in seconds for opening a toolbox."""
CALL_S = 60.0
"""Default deadline in seconds for one tool call."""
MAX_DEADLINES = 2
"""Number of calls past their deadline at which a rollout is given up."""


def check(*, toolbox: str, toolbox_options: Json | None = None, tool_parser: str = "hermes", **limits: object) -> None:
    """Raises SlimxError for a toolbox that cannot be created, an unknown parser, or a limit that is not positive.
    Called before the run starts."""
    for name, value in limits.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise SlimxError(
                f"rollout.options.{name} must be a number of seconds greater than 0, not {value!r}; correct or remove "
                f"rollout.options.{name}",
                code="tools.limit",
                about=f"rollout.options.{name}",
            )
    kind = imported("rollout.options.toolbox", toolbox, TOOLBOXES)
    missing = [name for name in ("open", "call", "judge", "close") if not callable(getattr(kind, name, None))]
    if missing:
        raise SlimxError(
            f"rollout.options.toolbox: {toolbox} has no method {missing[0]}; define the methods open, call, judge and "
            "close as described in slimx.extras.agents.toolbox",
            code="tools.methods",
            about="rollout.options.toolbox",
        )
    try:
        getattr(kind, "check", kind)(**(toolbox_options or {}))
    except TypeError as error:
        raise SlimxError(
            f"rollout.options.toolbox_options: {toolbox} rejects these options ({error}); set only options that "
            f"{toolbox} accepts",
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
    **_: object,
) -> None:
    """Checks the prompts with the toolbox's class method `check_prompts`, if it has one.

    Raises SlimxError if `open_deadline` or `call_deadline` is shorter than the time that the toolbox's `needs_seconds`
    returns.
    """
    kind = imported("rollout.options.toolbox", toolbox, TOOLBOXES)
    options = toolbox_options or {}
    prompts = list(prompts)
    check = getattr(kind, "check_prompts", None)
    if check is not None:
        check(prompts, **options)
    needs = getattr(kind, "needs_seconds", None)
    if needs is not None:
        deadlines = {"open_deadline": open_deadline, "call_deadline": call_deadline}
        for (name, seconds), needed in zip(deadlines.items(), needs(prompts, **options), strict=True):
            if seconds < needed:
                raise SlimxError(
                    f"rollout.options.{name} is {seconds:g} s, but {toolbox} may take up to {needed:g} s for this "
                    f"run's prompts; set rollout.options.{name} to at least {needed:g}, so that slow rollouts are not "
                    "aborted",
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
    """Plays one rollout and returns it as a trajectory: the model's turns are trained on; tool results are not.

    `toolbox`: dotted path or registered name of the toolbox's class. `toolbox_options`: keyword arguments of that
    class. `tool_parser`: name of the tool-call parser, or dotted path of a function. `max_turns`: maximum number of the
    model's turns. `max_calls`: maximum number of tool calls. `max_unreadable`: number of consecutive turns with an
    unreadable call after which the rollout ends. `max_context`: maximum length in tokens; None means the maximum length
    of a trainable trajectory. A rollout that is ended by a limit is trained on up to that point. `max_result`: maximum
    length in characters of one result for the model. `open_deadline`, `call_deadline`: seconds; the first call past its
    deadline is reported to the model, the second one ends the rollout.

    Metadata: `ended` (done, turns, calls, unreadable, context or length), `turns`, `tool_calls`, `tool_errors` (by
    code: unknown_tool, bad_arguments, deadline, unjudged, and those of the toolbox), `judged` (parts of the toolbox's
    reward), and `unjudged`, the reason why the toolbox could not verify the rollout (absent if it could). Logs
    tool_calls, tool_errors, unreadable_calls and left_out.

    Raises GivenUp: "tools lost" if the tools' server has died or cannot be reached, "tools deadline" if it hangs,
    "context" if the prompt and its tools leave no tokens for a turn.
    """
    box: Toolbox = imported("rollout.options.toolbox", toolbox, TOOLBOXES)(**(toolbox_options or {}))
    name = f"{toolbox} of rollout {ctx.group_id}/{ctx.index}"
    reader = AnswerReader(ctx.tokenizer, find_parser(tool_parser, ctx.address, ctx.headers))
    context = max_context
    if ctx.proxy is not None:
        context = min(max_context or ctx.proxy.context, ctx.proxy.context)
    try:
        opened = await _within(box.open(prompt, ctx.seed), open_deadline, f"{name} was not open")
        tools = [*(prompt.tools or []), *opened]
        encoder = ctx.prompt_ids or PromptIds(ctx.tokenizer)
        prompt = replace(prompt, tools=tools or None)
        await encoder.prepare(prompt)
        draft = ctx.draft(prompt)
        talk = _Talk(
            ctx, box, reader, encoder, draft, tools, name, context, max_calls, max_unreadable, max_result, call_deadline
        )
        ended = await talk.run(max_turns, {tool["function"]["name"] for tool in opened})
        judged = await _within(box.judge(talk.messages), call_deadline, f"{name} had not computed the reward")
    except ToolsLost as error:
        raise GivenUp("tools lost", f"{name}: {error}") from error
    finally:
        await asyncio.shield(_end(box))
    metadata = talk.summary(ended) | {"judged": judged}
    return draft.finish(metadata=metadata)


async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """Returns the parts of the reward that the toolbox computed. Raises SlimxError if there are none."""
    judged = trajectory.metadata["judged"]
    if not judged:
        raise SlimxError(
            f"reward.function={__name__}.reward expects rewards from rollout.options.toolbox, which returned none "
            f"for trajectory {trajectory.id}; return rewards from the toolbox's method `judge`, or set another "
            "reward.function",
            code="tools.reward",
            about="reward.function",
        )
    return judged


@dataclass(slots=True)
class _Talk:
    """Conversation of one rollout, with its counts and limits."""

    ctx: RolloutContext
    box: Toolbox
    reader: AnswerReader
    encoder: PromptIds
    draft: Draft
    tools: list[Json]
    """Tools in the chat template's format: those of the prompt, then those of the toolbox."""
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
        """Runs turns and their tool calls until a turn has no call or a limit is reached; returns the value of `ended`.

        `callable_`: names of the tools that the toolbox provides.
        """
        in_a_row = 0
        for turn in range(max_turns):
            sampling = self._sampling()
            if sampling is None:
                if not turn:
                    used = len(self.draft.token_ids)
                    text = (
                        f"{self.name}: the prompt and its tools take {used} tokens of the context of {self.context}; "
                        "shorten them or raise max_context"
                    )
                    raise GivenUp("context", text)
                return "context"
            completion = await self.ctx.engine.generate(
                self.draft.token_ids, sampling, turn=turn, images=self.draft.images
            )
            before = self.draft.token_ids
            self.draft.add_sampled(completion)
            ids = completion.token_ids.tolist()
            if completion.finish_reason != "stop":
                self.messages.append({"role": "assistant", "content": self.reader.text(ids, ())})
                return "length"
            found = await self.reader.calls(ids, self.tools, after=before)
            if not found.calls:
                self.messages.append({"role": "assistant", "content": self.reader.text(ids, ())})
                if not found.attempted:
                    return "done"
                self.unreadable += 1
                in_a_row += 1
                if in_a_row >= self.max_unreadable:
                    return "unreadable"
                # Inserted as role user, because templates attach a turn of role tool to a call, and there is none.
                await self._insert([{"role": "user", "content": UNREADABLE}])
                continue
            in_a_row = 0
            del before, completion, ids  # thousands of rollouts wait for tools, and a list takes 40 bytes per token
            calls = message_calls(found.calls, turn)
            self.messages.append({"role": "assistant", "content": found.text, "tool_calls": calls})
            if self.calls + len(calls) > self.max_calls:
                return "calls"
            results = []
            for call, message in zip(found.calls, calls, strict=True):
                results.append(await self._answered(call, message["id"], callable_))
            await self._insert(results, calls)
        return "turns"

    def summary(self, ended: str) -> Json:
        """Logs the counts of the finished rollout and returns its metadata. `ended`: return value of `run`."""
        unjudged = getattr(self.box, "unjudged", None)
        if unjudged is not None:
            self.errors["unjudged"] += 1
        self.ctx.add("tool_calls", self.calls)
        self.ctx.add("tool_errors", self.errors.total())
        self.ctx.add("unreadable_calls", self.unreadable)
        self.ctx.add("left_out", self.left_out)
        metadata: Json = {
            "ended": ended,
            "turns": self.draft.turn,
            "tool_calls": self.calls,
            "tool_errors": dict(sorted(self.errors.items())),
        }
        if unjudged is not None:
            metadata["unjudged"] = unjudged
        return metadata

    def _sampling(self) -> Json | None:
        """Returns sampling parameters that limit the next turn to the remaining context; None if no tokens are left for
        it."""
        if self.context is None:
            return {}
        room = self.context - len(self.draft.token_ids)
        if room <= 0:
            return None
        return {"max_new_tokens": min(room, self.ctx.engine.sampling["max_new_tokens"])}

    async def _insert(self, turns: Sequence[Json], calls: Sequence[Json] = ()) -> None:
        """Inserts `turns` after the model's last turn. `calls`: tool calls in the model's turn."""
        for turn in turns:
            content = turn["content"]
            text = content if isinstance(content, str) else content[0]["text"]
            self.messages.append({**turn, "content": text})
        after = self.draft.token_ids
        if isinstance(self.encoder, ImagePromptIds):
            token_ids, images = await self.encoder.turns(turns, after=after, tools=self.tools, calls=calls)
        else:
            token_ids = encode_turns(self.ctx.tokenizer, turns, after=after, tools=self.tools, calls=calls)
            images = []
        self.draft.add_inserted(token_ids, images=images)

    async def _answered(self, call: ToolCall, id: str, callable_: set[str]) -> Json:
        """Executes a tool call and returns the turn with its result. `id`: id of the call in the conversation."""
        self.calls += 1
        result = await self._result(call, callable_)
        self.left_out += result.left_out
        if result.error is not None:
            self.errors[result.error] += 1
        text = result.text
        if len(text) > self.max_result:
            text = f"{text[: self.max_result]}\n({len(text) - self.max_result} characters left out)"
        content: str | list[Json] = text
        if result.images and isinstance(self.encoder, ImagePromptIds):
            content = [{"type": "text", "text": text}, *({"type": "image", "image": image} for image in result.images)]
        elif result.images:
            self.left_out += len(result.images)
            content = "\n".join(filter(None, [text, *[UNSEEN] * len(result.images)]))
        return {"role": "tool", "content": content, "name": call.name, "tool_call_id": id}

    async def _result(self, call: ToolCall, callable_: set[str]) -> ToolResult:
        if call.name not in callable_:
            known = ", ".join(sorted(callable_)) or "none"
            return ToolResult(
                text=f"There is no tool {call.name}. The available tools are: {known}.", error="unknown_tool"
            )
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolResult(
                text="The arguments of this call are not a JSON object. Call the tool with a JSON object.",
                error="bad_arguments",
            )
        seconds = self.call_s
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self.box.call(call.name, arguments)
        except RecursionError:
            return ToolResult(
                text="The arguments of this call are nested too deeply. Use fewer nested levels.", error="bad_arguments"
            )
        except TimeoutError:
            if not limit.expired():
                raise
        if self.errors["deadline"] + 1 >= MAX_DEADLINES:
            raise GivenUp(
                "tools deadline",
                f"{self.name}: a second call of {call.name} took longer than {seconds:g} s, so the rollout is "
                "abandoned",
            )
        return ToolResult(text=f"The call took longer than {seconds:g} seconds and was canceled.", error="deadline")


async def _within[T](call: Awaitable[T], seconds: float, text: str) -> T:
    """Awaits `call`. Raises GivenUp, with a message that starts with `text`, if the call takes longer than
    `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise GivenUp("tools deadline", f"{text} after {seconds:g} s") from None


async def _end(box: Toolbox) -> None:
    """Closes a toolbox. Raises GivenUp if that fails; its server may then still be running."""
    try:
        await _within(box.close(), CLOSE_S, "tools were not closed")
    except GivenUp:
        raise
    except Exception as error:
        raise GivenUp("tools lost", f"the tools of a rollout could not be closed ({raised(error)})") from error

"""One agent's session at the proxy: forwards its requests to the engines, records the answers, and enforces limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

from slimx.data.records import Image, Trajectory
from slimx.errors import DeadlineError, SlimxError, raised
from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.apis.base import AnswerWriter, ChatApi
from slimx.extras.agents.proxy.bodies import RequestBody, encoded
from slimx.extras.agents.proxy.conversations import Conversations, Place, Position, Starts
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Json, Message, characters, parts, read_message
from slimx.extras.vision.prompts.prepare import ImagePromptIds
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.sending import AnswerError

if TYPE_CHECKING:
    from slimx.data.chat.tokens import PromptIds
    from slimx.rollout.hooks import RolloutContext


TOKEN_CHARACTERS = 64
"""Upper bound on the characters of a token, many times the average. A request with more characters than the context can
have at this ratio is refused without tokenizing."""
BYTE_CHARACTERS = 10
"""Upper bound on the characters that `characters` counts for a byte of a request, such as 17 for the number 1e15."""
QUICK = 4096
"""Characters up to which messages are tokenized at once. Longer ones are tokenized in a thread, which costs more time
than it takes to tokenize these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits on the conversations, requests and sampled tokens of one agent session."""

    context: int
    """Maximum length of one conversation including its answers, in tokens."""
    requests: int
    """Maximum number of requests in the session."""
    sampled: int | None = None
    """Maximum total number of tokens sampled in the session; None for no limit."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, with the state that is needed to respond to it."""

    request: ChatRequest
    position: Position
    sampling: Json
    """Sampling parameters of the request that differ from the run's."""
    index: int
    """Index of the request in its session. The request's seed is derived from this index and the rollout's seed."""
    writer: AnswerWriter
    """Writer of the response in the format of the API."""


class Session:
    """Session of one rollout's agent: its limits, conversations and counts."""

    def __init__(
        self,
        ctx: RolloutContext,
        reading: AnswerReader,
        limits: SessionLimits,
        *,
        strict: bool = False,
        images: Collection[str] = (),
    ) -> None:
        """Creates a session without conversations.

        `strict`: True to refuse sampling parameters other than the run's instead of overriding them. `images`: the
        prompt's images, to which messages may refer in a run with `trainer.vision`.
        """
        self._ctx = ctx
        self._reading = reading
        self._limits = limits
        self._strict = strict
        self._conversations = Conversations(ctx.tokenizer)
        self._known = images
        self._images = ctx.prompt_ids if isinstance(ctx.prompt_ids, ImagePromptIds) else None
        self._requests = 0
        self._sampled = 0
        self._forced = 0
        self._overridden: set[str] = set()
        self._errors: Counter[str] = Counter()
        self.tool_calls = 0
        """Number of tool calls in all answers."""
        self.unreadable_calls = 0
        """Number of answers in which a call begins but none can be parsed."""
        self.last_error: ApiError | None = None
        """The last response to the agent if it was an error, which may be the reason for the agent's failure; otherwise
        None."""
        self.limited = False
        """True once a limit was reached."""

    @property
    def takes_images(self) -> bool:
        """True if messages may contain images, because the run has `trainer.vision`."""
        return self._images is not None

    def trajectories(self, metadata: Json) -> list[Trajectory]:
        """Returns the sampled trajectories, whose metadata consists of `metadata` and the session's counts; [] if
        nothing was sampled."""
        counts: Json = {"requests": self._requests, "overridden": sorted(self._overridden)}
        if self._forced:
            counts["forced"] = self._forced
        if self._errors:
            counts["errors"] = dict(sorted(self._errors.items()))
        return self._conversations.trajectories(self._ctx, counts | metadata)

    @property
    def group(self) -> PromptIds | None:
        """Object that the rollouts of the session's group have in common; None if there is none."""
        return self._ctx.prompt_ids

    def share(self, starts: Starts) -> None:
        """Shares the token ids of first messages with the sessions of the group, which have the same `starts`."""
        self._conversations.starts = starts

    async def count(self, api: ChatApi, body: RequestBody, tokenizing: Executor) -> int:
        """Returns the length of a request's prompt in tokens, without sampling.

        `tokenizing`: executor for parsing and tokenizing. Raises ApiError for an invalid request.
        """
        _, position = await self._read(api, body, tokenizing, strict=False)
        return len(position.token_ids)

    async def answer(
        self, api: ChatApi, body: RequestBody, http: web.Request, tokenizing: Executor
    ) -> web.StreamResponse:
        """Returns the response to one request.

        `tokenizing`: executor for parsing and tokenizing what is large, so that the event loop can serve other agents.
        Raises ApiError for failures before anything is sent.
        """
        try:
            request, position = await self._read(api, body, tokenizing, strict=self._strict)
            grammar = None
            if request.forced is not None:  # in a thread, because importing xgrammar takes seconds
                loop = asyncio.get_running_loop()
                grammar = await loop.run_in_executor(tokenizing, self._reading.grammar, request)
            self._overridden.update(request.overridden)
            sampling = self._admit(request, position, grammar)
            index = self._requests
            self._requests += 1
            self.last_error = None
            writer = api.writer(request, index, len(position.token_ids), self._reading)
            exchange = Exchange(request, position, sampling, index, writer)
            if request.stream:
                return await self._stream(exchange, http)
            out = encoded(writer.complete(*await self._complete_answer(exchange)))
            return web.Response(body=out, content_type="application/json")
        except ApiError as error:
            self._count_error(error)
            self.limited |= error.code == "context_length_exceeded"
            raise
        except asyncio.CancelledError:
            # The agent disconnected or the rollout ended, so the sampled tokens are not part of the rollout.
            self._errors["agent_left"] += 1
            raise

    def _count_error(self, error: ApiError) -> None:
        self.last_error = error
        self._errors[error.code] += 1

    def _admit(self, request: ChatRequest, position: Position, grammar: str | None) -> Json:
        """Returns the sampling parameters for the answer. Raises ApiError if a limit is reached."""
        limits = self._limits
        length = len(position.token_ids)
        room = limits.context - length
        left = room if limits.sampled is None else limits.sampled - self._sampled
        if self._requests >= limits.requests:
            self._refuse(
                position, "request_limit_exceeded", f"the limit on requests per session, {limits.requests}, is reached"
            )
        if room < 1:
            text = (
                f"This model's maximum context length is {limits.context} tokens, but your messages have {length} "
                "tokens and leave no room for an answer."
            )
            self._refuse(position, "context_length_exceeded", text)
        if left < 1:
            text = f"the limit on sampled tokens per session, {limits.sampled}, is reached"
            self._refuse(position, "token_budget_exceeded", text)
        most = self._ctx.engine.sampling["max_new_tokens"]
        sampling: Json = {"max_new_tokens": min(room, left, most, request.max_tokens or most)}
        if request.stop:
            sampling["stop"] = request.stop
        if grammar is not None:
            sampling["ebnf"] = grammar
        return sampling

    async def _read(
        self, api: ChatApi, body: RequestBody, tokenizing: Executor, *, strict: bool
    ) -> tuple[ChatRequest, Position]:
        """Parses a request and finds the position of its answer, and prepares the images of its new messages. Takes a
        thread of `tokenizing` for what would hold up the event loop."""
        loop = asyncio.get_running_loop()
        if body.is_large:
            request, place = await loop.run_in_executor(tokenizing, self._read_here, api, body, strict)
        else:
            request, place = self._read_here(api, body, strict)
        position = self._conversations.known(place)
        if position is None:
            if (len(body.data) if place.parent is None else place.characters) <= QUICK:
                position = self._tokenized(place)
            else:
                position = await loop.run_in_executor(tokenizing, self._tokenized, place)
            self._conversations.share(place, position)
        if self._images is None or not position.sources:
            return request, position
        try:
            return request, position.placed(*await self._images.expand(position.before.tolist(), position.sources))
        except SlimxError as error:
            raise ApiError(str(error), code="invalid_value", param="messages") from error

    def _read_here(self, api: ChatApi, body: RequestBody, strict: bool) -> tuple[ChatRequest, Place]:
        with _template_errors():
            images = self._known if self.takes_images else None
            request = api.read(body.parsed(), self._ctx.engine.sampling, strict=strict, images=images)
            context = self._limits.context
            self._check_size(parts(request), context, "messages, calls and tools")
            if BYTE_CHARACTERS * len(body.data) > context * TOKEN_CHARACTERS:  # otherwise it cannot have too many
                self._check_size(characters(request), context * TOKEN_CHARACTERS, "characters")
            return request, self._conversations.locate(request.messages, request.tools)

    def _check_size(self, count: int, most: int, unit: str) -> None:
        if count > most:
            text = (
                f"This model's maximum context length is {self._limits.context} tokens, but your messages have {count} "
                f"{unit}, more than would fit."
            )
            raise ApiError(text, code="context_length_exceeded", param="messages")

    def _tokenized(self, place: Place) -> Position:
        with _template_errors():
            return self._conversations.tokenized(place)

    def _refuse(self, position: Position, code: str, text: str) -> NoReturn:
        """Marks the conversation as stopped and raises ApiError for a limit that was reached."""
        self.limited = True
        if position.parent is not None:
            position.parent.stopped = True
        raise ApiError(text, code=code, param="messages")

    def _shown(self, position: Position) -> list[Image]:
        return position.shown if self.takes_images else []

    async def _complete_answer(self, exchange: Exchange) -> tuple[Message, Completion]:
        with _engine_errors():
            position = exchange.position
            completion = await self._ctx.engine.generate(
                position.token_ids, exchange.sampling, turn=exchange.index, images=self._shown(position)
            )
        return await self._keep(exchange, completion), completion

    async def _stream(self, exchange: Exchange, http: web.Request) -> web.StreamResponse:
        """Sends the answer as server-sent events. An error after the first event is sent as an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            # Closes the events as soon as the agent disconnects, which frees the engine.
            async with contextlib.aclosing(self._events(exchange)) as events:
                async for event in events:
                    if not response.prepared:
                        await response.prepare(http)
                    await response.write(event)
        except ApiError as error:
            if not response.prepared:
                raise
            self._count_error(error)
            await response.write(exchange.writer.failed(error))
        return response

    async def _events(self, exchange: Exchange) -> AsyncGenerator[bytes]:
        """Yields the events of a streamed answer. An answer that must be parsed as a whole is sent at the end."""
        writer = exchange.writer
        pieces = self._reading.pieces(exchange.request)
        if (
            exchange.request.forced is not None
        ):  # not streamed, because an interrupted stream with a grammar cannot be continued
            message, completion = await self._complete_answer(exchange)
            yield writer.begin()
            yield writer.end(message, None, completion)
            return
        with _engine_errors():
            position = exchange.position
            stream = self._ctx.engine.stream(
                position.token_ids, exchange.sampling, turn=exchange.index, images=self._shown(position)
            )
            async with stream as tokens:
                first = True
                async for piece in tokens:
                    if first:
                        yield writer.begin()
                        first = False
                    text = ""
                    if pieces is not None:
                        text = pieces.add(piece.token_ids.tolist())
                    event = writer.piece(text, piece)
                    if event:
                        yield event
                completion = tokens.completion
        rest = None
        shown = None
        if pieces is not None:
            rest = pieces.end()
            shown = pieces.shown
        message = await self._keep(exchange, completion, shown)
        if first:
            yield writer.begin()
        yield writer.end(message, rest, completion)

    async def _message(self, exchange: Exchange, completion: Completion) -> tuple[Message, bool]:
        ids = completion.token_ids.tolist()
        try:
            return await self._reading.message(ids, exchange.request, exchange.index, after=exchange.position.token_ids)
        except Exception as error:
            text = f"rollout.options.tool_parser raised {raised(error)}"
            raise ApiError(text, code="tool_parser_failed", status=500) from error

    async def _keep(self, exchange: Exchange, completion: Completion, shown: str | None = None) -> Message:
        """Adds the completion to the rollout and returns it as a message for the agent.

        `shown`: text of the message if it was sent incrementally.
        """
        message: Message = {"role": "assistant", "content": shown}
        attempted = False
        if shown is None:
            message, attempted = await self._message(exchange, completion)
        if completion.finish_reason == "abort":
            raise ApiError("the engine aborted the request", code="aborted", status=503)
        request = exchange.request
        calls = len(message.get("tool_calls", []))
        if request.forced is not None and not calls and completion.finish_reason == "stop":
            raise ApiError(
                "the model generated no tool call, although tool_choice requires one; send the request again, or "
                "remove tool_choice from the request",
                code="engine_failed",
                status=502,
            )
        # Log-probs under a grammar are normalized over the tokens that it allows, so they are not the policy's.
        self._conversations.add(exchange.position, completion, read_message(message), train=request.forced is None)
        self._sampled += len(completion.token_ids)
        if request.forced is not None:
            self._forced += 1
        self.tool_calls += calls
        if attempted and not calls:
            self.unreadable_calls += 1
        return message


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Converts errors of the chat template, also for a request that is nested too deeply for it, to ApiError."""
    try:
        yield
    except SlimxError as error:
        raise ApiError(str(error), code="invalid_value", param="messages") from error
    except RecursionError:
        text = "tools or tool_calls are nested too deeply for the chat template"
        raise ApiError(text, code="invalid_value", param="tools") from None


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Converts errors of the engines to ApiError.

    Clients retry requests after these errors, except requests that an engine refused.
    """
    try:
        yield
    except DeadlineError as error:
        raise ApiError(str(error), code="engine_deadline", status=504) from error
    except SlimxError as error:
        if isinstance(error, AnswerError) and error.status == 400:
            raise ApiError(str(error), code="engine_refused", status=400) from error
        raise ApiError(str(error), code="engine_failed", status=502) from error

"""One agent's share of the proxy: its requests go to the engines, what is sampled for them is kept, limits hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from aiohttp import web

from slimx.data.records import Trajectory
from slimx.errors import DeadlineError, SlimxError, raised
from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.apis.wire import AnswerWriter, Wire
from slimx.extras.agents.proxy.conversations import Conversations, Position
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Json, Message, characters, parts, read_message
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.sending import AnswerError

if TYPE_CHECKING:
    from slimx.rollout.hooks import RolloutContext


TOKEN_CHARACTERS = 64
"""Characters of a token, many times the average: longer text is refused before it is tokenized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session."""

    context: int
    """Tokens of one conversation, answers included."""
    requests: int
    """Requests that are answered."""
    sampled: int | None = None
    """Tokens that are sampled, all answers together; None: no limit of its own."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what is needed to answer it."""

    request: ChatRequest
    place: Position
    sampling: Json
    """Sampling parameters that differ from the run's."""
    number: int
    """Number of the request in its session: the turn by which it is seeded."""
    writer: AnswerWriter
    """Writes the answer in the words of the API that was asked."""


class Session:
    """One rollout's agent at the proxy: what it may ask, and what it was answered."""

    def __init__(
        self, ctx: RolloutContext, reading: AnswerReader, limits: SessionLimits, *, strict: bool = False
    ) -> None:
        """`strict`: refuse an agent that asks for another sampling than the run's; else it gets the run's."""
        self._ctx, self._reading, self._limits, self._strict = ctx, reading, limits, strict
        self._conversations = Conversations(ctx.tokenizer)
        self._requests = self._sampled = self._forced = 0
        self._overridden: set[str] = set()
        self._errors: Counter[str] = Counter()
        self.tool_calls = 0
        """Tools that the policy called, in all answers together."""
        self.unreadable_calls = 0
        """Answers in which a call begins, and none can be read."""
        self.last_error: ApiError | None = None
        """The last answer to the agent, if that was an error: a reason why it may have given up."""
        self.limited = False
        """True if a limit was reached."""

    def trajectories(self, metadata: Json) -> list[Trajectory]:
        """The trajectories that were sampled; [] if none were."""
        told: Json = {"requests": self._requests, "overridden": sorted(self._overridden)}
        if self._forced:
            told["forced"] = self._forced
        if self._errors:
            told["errors"] = dict(sorted(self._errors.items()))
        return self._conversations.trajectories(self._ctx, told | metadata)

    async def count(self, wire: Wire, body: Any, tokenizing: Executor) -> int:
        """Tokens of a request's prompt; nothing is sampled. Raises ApiError."""
        _, place = await self._read(wire, body, tokenizing, strict=False)
        return len(place.token_ids)

    async def answer(self, wire: Wire, body: Any, http: web.Request, tokenizing: Executor) -> web.StreamResponse:
        """The response to one request, whose messages become tokens in a thread of `tokenizing`: the loop serves every
        other agent meanwhile. Raises ApiError for what fails before anything is sent."""
        try:
            request, place = await self._read(wire, body, tokenizing, strict=self._strict)
            grammar = None
            if request.forced is not None:  # in a thread: the import of xgrammar alone takes seconds
                loop = asyncio.get_running_loop()
                grammar = await loop.run_in_executor(tokenizing, self._reading.grammar, request)
            self._overridden.update(request.overridden)
            sampling = self._admit(request, place, grammar)
            number, self._requests = self._requests, self._requests + 1
            self.last_error = None
            writer = wire.writer(request, number, len(place.token_ids), self._reading)
            exchange = Exchange(request, place, sampling, number, writer)
            if request.stream:
                return await self._stream(exchange, http)
            return web.json_response(writer.whole(*await self._whole(exchange)))
        except ApiError as error:
            self._count_error(error)
            self.limited |= error.code == "context_length_exceeded"
            raise
        except asyncio.CancelledError:
            # The agent's client hung up, or the rollout ended: what was sampled is no part of it.
            self._errors["agent_left"] += 1
            raise

    def _count_error(self, error: ApiError) -> None:
        self.last_error = error
        self._errors[error.code] += 1

    def _admit(self, request: ChatRequest, place: Position, grammar: str | None) -> Json:
        """The sampling for the request's answer at `place`; ApiError if a limit is reached."""
        limits = self._limits
        length = len(place.token_ids)
        room = limits.context - length
        left = room if limits.sampled is None else limits.sampled - self._sampled
        if self._requests >= limits.requests:
            self._refuse(place, "request_limit_exceeded", f"this session has had its {limits.requests} requests")
        if room < 1:
            text = (
                f"This model's maximum context length is {limits.context} tokens, your messages have {length} tokens "
                "and leave no room for an answer."
            )
            self._refuse(place, "context_length_exceeded", text)
        if left < 1:
            self._refuse(place, "token_budget_exceeded", f"this session has had its {limits.sampled} sampled tokens")
        most = self._ctx.engine.sampling["max_new_tokens"]
        sampling: Json = {"max_new_tokens": min(room, left, most, request.max_tokens or most)}
        if request.stop:
            sampling["stop"] = request.stop
        if grammar is not None:
            sampling["ebnf"] = grammar
        return sampling

    async def _read(self, wire: Wire, body: Any, tokenizing: Executor, *, strict: bool) -> tuple[ChatRequest, Position]:
        """The request in a body, and the position of its answer, both found in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(tokenizing, self._read_here, wire, body, strict)

    def _read_here(self, wire: Wire, body: Any, strict: bool) -> tuple[ChatRequest, Position]:
        try:
            request, context = wire.read(body, self._ctx.engine.sampling, strict=strict), self._limits.context
            for count, most, what in (
                (parts(request), context, "messages, calls and tools"),
                (characters(request), context * TOKEN_CHARACTERS, "characters"),
            ):
                if count > most:
                    text = (
                        f"This model's maximum context length is {context} tokens, and your messages have {count} "
                        f"{what}, more than would fit."
                    )
                    raise ApiError(text, code="context_length_exceeded", param="messages")
            return request, self._conversations.place(request.messages, request.tools)
        except SlimxError as error:
            raise ApiError(str(error), code="invalid_value", param="messages") from error
        except RecursionError:
            text = "tools or tool_calls are nested too deeply for the chat template"
            raise ApiError(text, code="invalid_value", param="tools") from None

    def _refuse(self, place: Position, code: str, text: str) -> NoReturn:
        """A limit is reached: the conversation is over, and the agent may be too."""
        self.limited = True
        if place.parent is not None:
            place.parent.stopped = True
        raise ApiError(text, code=code, param="messages")

    async def _whole(self, exchange: Exchange) -> tuple[Message, Completion]:
        with _engine_errors():
            tokens, sampling = exchange.place.token_ids, exchange.sampling
            completion = await self._ctx.engine.generate(tokens, sampling, turn=exchange.number)
        return await self._keep(exchange, completion), completion

    async def _stream(self, exchange: Exchange, http: web.Request) -> web.StreamResponse:
        """Server-sent events; an error in their middle is one of them."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            # Closed at once when the agent goes away: it holds a place at the engines.
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

    async def _events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The events of a streamed answer. One that has to be read as a whole first comes at its end."""
        writer, pieces = exchange.writer, self._reading.pieces(exchange.request)
        if exchange.request.forced is not None:  # asked for whole: a stream that broke off could not be continued
            message, completion = await self._whole(exchange)
            yield writer.begin()
            yield writer.end(message, None, completion)
            return
        with _engine_errors():
            stream = self._ctx.engine.stream(exchange.place.token_ids, exchange.sampling, turn=exchange.number)
            async with stream as tokens:
                first = True
                async for piece in tokens:
                    if first:
                        yield writer.begin()
                        first = False
                    if event := writer.piece(pieces.add(piece.token_ids.tolist()) if pieces is not None else "", piece):
                        yield event
                completion = tokens.completion
        rest = pieces.end() if pieces is not None else None
        message = await self._keep(exchange, completion, pieces.shown if pieces is not None else None)
        if first:
            yield writer.begin()
        yield writer.end(message, rest, completion)

    async def _message(self, exchange: Exchange, completion: Completion) -> tuple[Message, bool]:
        ids = completion.token_ids.tolist()
        try:
            return await self._reading.message(ids, exchange.request, exchange.number, after=exchange.place.token_ids)
        except Exception as error:
            text = f"rollout.options.tool_parser raised {raised(error)}"
            raise ApiError(text, code="tool_parser_failed", status=500) from error

    async def _keep(self, exchange: Exchange, completion: Completion, shown: str | None = None) -> Message:
        """The message for the agent, whose answer is a part of the rollout from now on. `shown`: its text, if that
        went to the agent in pieces."""
        message: Message = {"role": "assistant", "content": shown}
        attempted = False
        if shown is None:
            message, attempted = await self._message(exchange, completion)
        if completion.finish_reason == "abort":
            raise ApiError("the engine aborted the request", code="aborted", status=503)
        request, calls = exchange.request, len(message.get("tool_calls", []))
        if request.forced is not None and not calls and completion.finish_reason == "stop":
            raise ApiError(
                "the engine made no call, though its grammar leaves nothing else", code="engine_failed", status=502
            )
        # Log-probs under a grammar are of what it left to choose from: no gradient of the policy's own choice.
        self._conversations.add(exchange.place, completion, read_message(message), train=request.forced is None)
        self._sampled += len(completion.token_ids)
        self._forced += request.forced is not None
        self.tool_calls += calls
        self.unreadable_calls += attempted and not calls
        return message


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Errors of the engines as the API tells them. What an engine refuses is not asked again, the rest may be."""
    try:
        yield
    except DeadlineError as error:
        raise ApiError(str(error), code="engine_deadline", status=504) from error
    except SlimxError as error:
        refused = isinstance(error, AnswerError) and error.status == 400
        code, status = ("engine_refused", 400) if refused else ("engine_failed", 502)
        raise ApiError(str(error), code=code, status=status) from error

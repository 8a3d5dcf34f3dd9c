"""The interface of an API that agents use: it parses requests, and writes responses and errors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Json, Message
from slimx.rollout.client.completion import Completion


@dataclass
class AnswerWriter(ABC):
    """Base class of response writers; each instance writes one response, as a whole or as server-sent events."""

    request: ChatRequest
    index: int
    """Index of the request in its session."""
    prompt: int
    """Length of the prompt in tokens."""
    reading: AnswerReader
    created: int = field(default_factory=lambda: int(time.time()))
    _open: bool = field(default=False, init=False)
    """True while a text block or item of the streamed response is open."""

    @abstractmethod
    def complete(self, message: Message, completion: Completion) -> Json:
        """Returns the JSON body of the response to a non-streaming request."""

    @abstractmethod
    def begin(self) -> bytes:
        """Returns the events that precede the first piece of text."""

    @abstractmethod
    def piece(self, shown: str, piece: Completion) -> bytes:
        """Returns the events that send newly sampled tokens. `shown`: text that can be sent now, possibly ""."""

    @abstractmethod
    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """Returns the events that send the rest of the response and end it.

        `rest`: text that has not been sent yet; None if nothing was sent incrementally and therefore all of `message`
        must be sent.
        """

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Returns the events that report an error after the response has started."""


@dataclass(frozen=True, slots=True)
class ChatApi:
    """Parser, writer and error format of one API."""

    read: Callable[..., ChatRequest]
    """Function that parses a JSON body, given the run's sampling parameters, `strict`, and `images` as in `content_of`.
    Raises ApiError for an unsupported request."""
    writer: type[AnswerWriter]
    refusal: Callable[[ApiError], Json] = lambda error: error.body
    """Function that returns the JSON body of an error response."""

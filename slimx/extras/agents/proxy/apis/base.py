"""The interface of an API for agents: parsing requests, and writing responses and errors."""

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
    """Writes one response, as a whole or as server-sent events."""

    request: ChatRequest
    index: int
    """Index of the request in its session."""
    prompt: int
    """Length of the prompt in tokens."""
    reading: AnswerReader
    created: int = field(default_factory=lambda: int(time.time()))
    _open: bool = field(default=False, init=False)
    """True while a text block is open."""

    @abstractmethod
    def complete(self, message: Message, completion: Completion) -> Json:
        """Returns the response as a whole."""

    @abstractmethod
    def begin(self) -> bytes:
        """Returns the events before any text."""

    @abstractmethod
    def piece(self, shown: str, piece: Completion) -> bytes:
        """Returns the events of newly sampled tokens. `shown`: the text that can be sent now; may be empty."""

    @abstractmethod
    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """Returns the remaining events, and the end. `rest`: the text not sent yet; None if none was sent."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Returns the events of a response that fails after its beginning."""


@dataclass(frozen=True, slots=True)
class ChatApi:
    """One API."""

    read: Callable[..., ChatRequest]
    """(body, the run's sampling, strict=...) -> the request. Raises ApiError for an unsupported request."""
    writer: type[AnswerWriter]
    refusal: Callable[[ApiError], Json] = lambda error: error.body
    """Error -> body of the error response."""

"""An API that agents speak: its requests are read, and its answers and errors written."""

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
    """Writes one answer, whole or as server-sent events."""

    request: ChatRequest
    number: int
    """Number of the request in its session."""
    prompt: int
    """Tokens before the answer."""
    reading: AnswerReader
    created: int = field(default_factory=lambda: int(time.time()))
    _open: bool = field(default=False, init=False)
    """True while text that was begun is not ended."""

    @abstractmethod
    def whole(self, message: Message, completion: Completion) -> Json:
        """The answer in one."""

    @abstractmethod
    def begin(self) -> bytes:
        """The events before all text."""

    @abstractmethod
    def piece(self, shown: str, piece: Completion) -> bytes:
        """The events of newly sampled tokens, of which `shown` is the text that can be shown now; may be empty."""

    @abstractmethod
    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """The events of what is left, and the end. `rest`: the text that was not shown yet; None if none was shown."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The events of an answer that fails after its beginning."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One API."""

    read: Callable[..., ChatRequest]
    """(body, the run's sampling, strict=...) -> the request. Raises ApiError for what cannot be carried out."""
    writer: type[AnswerWriter]
    refusal: Callable[[ApiError], Json] = lambda error: error.body
    """The body of an error."""

"""Protocols of an API that agents speak: they read its requests, and write its answers and errors."""

from __future__ import annotations

from typing import Any, Protocol

from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Json, Message
from slimx.rollout.client.completion import Completion


class AnswerWriter(Protocol):
    """Writes one answer, whole or as server-sent events."""

    def whole(self, message: Message, completion: Completion) -> Json:
        """The answer in one."""

    def begin(self) -> bytes:
        """The events before all text."""

    def piece(self, shown: str, piece: Completion) -> bytes:
        """The events of newly sampled tokens, of which `shown` is the text that can be shown now; may be empty."""

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """The events of what is left, and the end. `rest`: the text that was not shown yet; None if none was shown."""

    def failed(self, error: ApiError) -> bytes:
        """The events of an answer that fails after its beginning."""


class Wire(Protocol):
    """One API."""

    def read(self, body: Any, sampling: Json, *, strict: bool) -> ChatRequest:
        """The request in a JSON body. Raises ApiError for what cannot be carried out."""

    def refusal(self, error: ApiError) -> Json:
        """The body of an error."""

    def writer(self, request: ChatRequest, number: int, prompt: int, reading: AnswerReader) -> AnswerWriter:
        """The writer of one answer; `number` of the request in its session, `prompt` tokens before the answer."""

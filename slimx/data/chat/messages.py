"""Chat messages in the format that chat templates accept, and a check that a rendered conversation contains all of
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slimx.data.chat.responses import THOUGHT_ENDS
from slimx.errors import SlimxError
from slimx.json_types import Json

MARK = "(turn {} 8d1f)"
"""Marker that contains a message's index; it is appended to the message's text to find the message in the rendered
conversation."""


def with_text(messages: Sequence[Json], where: str) -> list[Json]:
    """Returns `messages` with each content as one string: text parts are joined, and missing content of a message that
    calls tools becomes "". Raises SlimxError for a message that chat templates cannot render, and if the last message
    is from the assistant. `where`: location of the messages, for errors."""
    out = []
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
            raise SlimxError(
                f"{where}: messages[{turn}] contains {', '.join(map(str, message)) or 'nothing'}, but a message needs "
                "content and a role (a string); rewrite the row in a rollout.map hook",
                code="prompts.message",
                about=where,
            )
        content = message.get("content")
        if isinstance(content, list) and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        elif content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise SlimxError(
                f"{where}: messages[{turn}].content is {_kind(content)}; replace the content with a string, or with "
                "parts of type text; parts of type image need trainer.vision",
                code="prompts.content",
                about=where,
            )
        out.append({**message, "content": content})
    if out and out[-1]["role"] == "assistant":
        raise SlimxError(
            f"{where}: messages end with an assistant's message, to which the model would reply; remove this "
            "message, or move its text to the key `answer` of the row",
            code="prompts.last_turn",
            about=where,
        )
    return out


def _kind(content: object) -> str:
    if content is None:
        return "null"
    if isinstance(content, list):
        return "a list with parts other than text"
    return repr(content)[:100]


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def unseen(messages: Sequence[Json], rendered: str, render: Callable[[Sequence[Json]], str]) -> int | None:
    """Returns the index of a message whose text is missing from `rendered`, the result of `render(messages)`; None if
    no text is missing. Text that is not found verbatim is searched for by its `MARK` in a second rendering, because
    templates may drop the thinking of past turns and may reformat text."""
    texts = [_text(message) for message in messages]
    if _contains(rendered, texts):
        return None
    marked = []
    for turn, message in enumerate(messages):
        if texts[turn]:
            message = {**message, "content": f"{message['content']}{MARK.format(turn)}"}
        marked.append(message)
    marked_rendering = render(marked)
    for turn, text in enumerate(texts):
        if text and MARK.format(turn) not in marked_rendering:
            return turn
    return None


def _contains(rendered: str, texts: Sequence[str]) -> bool:
    """Returns True if `rendered` contains all `texts` in this order, without overlap."""
    position = 0
    for text in texts:
        position = rendered.find(text, position)
        if position < 0:
            return False
        position += len(text)
    return True


def _text(message: Json) -> str:
    """Returns the part of a message's text that a rendering must contain: the text after the thinking in an assistant
    message, the whole text in any other message."""
    content = message.get("content")
    if not isinstance(content, str):
        return ""
    if message.get("role") == "assistant":
        content = content.rpartition(THOUGHT_ENDS)[2]
    return content.strip()

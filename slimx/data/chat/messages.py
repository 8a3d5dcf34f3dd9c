"""Turns of a chat as chat templates take them, and whether a rendering shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slimx.data.chat.responses import THOUGHT_ENDS
from slimx.errors import SlimxError

MARK = "(turn {} 8d1f)"
"""Stands behind a turn's text where it is to be found in a rendering."""


def with_text(messages: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Returns `messages` with their content as one text each: parts of text are joined, and a turn that only calls
    tools has none. Raises SlimxError naming `where` the messages stand, and a turn that no chat template shows."""
    out = []
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
            raise SlimxError(
                f"{where}: messages[{turn}] has {', '.join(map(str, message)) or 'nothing'}; a turn has role and "
                "content; rollout.map can rewrite rows",
                code="prompts.message",
                about=where,
            )
        content = message.get("content")
        if isinstance(content, list) and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        elif content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            found = (
                "null" if content is None else "parts other than text" if isinstance(content, list) else repr(content)
            )
            raise SlimxError(
                f"{where}: messages[{turn}].content is {found[:100]}; give text, or a list of parts of type text",
                code="prompts.content",
                about=where,
            )
        out.append({**message, "content": content})
    if out and out[-1]["role"] == "assistant":
        raise SlimxError(
            f"{where}: messages end with an assistant's turn, which the model would answer; leave it out, and give an "
            "answer to learn from or to compare with as answer",
            code="prompts.last_turn",
            about=where,
        )
    return out


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def unseen(
    messages: Sequence[dict[str, Any]], rendered: str, render: Callable[[Sequence[dict[str, Any]]], str]
) -> int | None:
    """Returns the number of a turn whose text `rendered`, which `render` made of the messages, does not show; None if
    it shows them all. Templates may drop the thinking of past turns, and may write a text in another way."""
    texts, at = [_text(message) for message in messages], 0
    for text in texts:
        if (at := rendered.find(text, at)) < 0:
            break
        at += len(text)
    else:
        return None
    marked = [
        {**message, "content": f"{message['content']}{MARK.format(turn)}"} if texts[turn] else message
        for turn, message in enumerate(messages)
    ]
    again = render(marked)
    return next((turn for turn, text in enumerate(texts) if text and MARK.format(turn) not in again), None)


def _text(message: dict[str, Any]) -> str:
    """The text that a rendering must show."""
    content = message.get("content")
    if not isinstance(content, str):
        return ""
    return (content.rpartition(THOUGHT_ENDS)[2] if message.get("role") == "assistant" else content).strip()

"""Turns of a chat in the form of chat templates, and a check that a rendering contains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slimx.data.chat.responses import THOUGHT_ENDS
from slimx.errors import SlimxError
from slimx.json_types import Json

MARK = "(turn {} 8d1f)"
"""Mark appended to a turn's text to find it in a rendering."""


def with_text(messages: Sequence[Json], where: str) -> list[Json]:
    """Returns `messages` with each content as one text: parts of text are joined, and a turn that only calls tools has
    "". Raises SlimxError for a turn that chat templates cannot render. `where`: location of the messages."""
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
            raise SlimxError(
                f"{where}: messages[{turn}].content is {_kind(content)}; give text, or a list of parts of type text",
                code="prompts.content",
                about=where,
            )
        out.append({**message, "content": content})
    if out and out[-1]["role"] == "assistant":
        raise SlimxError(
            f"{where}: messages end with an assistant's turn, which the model would answer; leave it out, and set "
            "`answer` to an answer to learn from or to compare with",
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
    """Returns the index of a turn whose text is missing in `rendered`, the result of `render` for the messages; None if
    all are contained. Templates may drop the thinking of past turns, and may change the form of a text."""
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
    """Returns True if `rendered` contains the texts in their order."""
    position = 0
    for text in texts:
        position = rendered.find(text, position)
        if position < 0:
            return False
        position += len(text)
    return True


def _text(message: Json) -> str:
    """Returns the text that a rendering must contain."""
    content = message.get("content")
    if not isinstance(content, str):
        return ""
    if message.get("role") == "assistant":
        content = content.rpartition(THOUGHT_ENDS)[2]
    return content.strip()

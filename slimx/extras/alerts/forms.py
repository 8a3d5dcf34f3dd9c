"""Forms in which a webhook receives an event: as JSON, or as a message for Slack, Feishu or Lark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal
from urllib.parse import urlsplit

from slimx.extras.alerts.event import Event
from slimx.json_types import Json

Form = Literal["json", "slack", "feishu"]
HOSTS: dict[str, Form] = {
    "hooks.slack.com": "slack",
    "hooks.slack-gov.com": "slack",
    "open.feishu.cn": "feishu",
    "open.larksuite.com": "feishu",
}
"""Hosts whose webhooks need a form other than JSON with all fields."""
SLACK_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
RETRIED = (429, 500, 502, 503, 504)
"""HTTP statuses after which an event is posted again."""
BUSY_CODES = (9499, 11232, 2200)
"""Codes by which Feishu and Lark refuse a message that they may accept later: two for too many messages, 5 in a second
or 100 in a minute, and one for internal errors. Others, such as 19024 for a missing keyword and 19021 for a wrong
signature, are final. They come with the status 200 or 400."""
BUSY_S = 10.0
"""Pause in seconds before a message is posted again that was refused with one of these codes."""
MOST = 2900
"""Maximum number of characters of a message. Slack accepts 3,000 in one block."""


def form_of(url: str, form: Literal["auto"] | Form) -> Form:
    """Returns the form for a webhook: `form`, or the one of the URL's host if `form` is "auto"."""
    if form != "auto":
        return form
    return HOSTS.get(urlsplit(url).hostname or "", "json")


def body_of(event: Event, form: Form) -> Json:
    """Returns the body of the request that posts an event."""
    if form == "slack":
        # Slack interprets these three characters in texts, and counts them as they are escaped.
        escaped = _shortened([SLACK_ESCAPES.get(character, character) for character in event.text])
        return {"text": escaped, "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": escaped}}]}
    if form == "feishu":
        return {"msg_type": "text", "content": {"text": _shortened(event.text)}}
    body = asdict(event)
    if event.alert is None:
        del body["alert"]
    return body


def _shortened(characters: Iterable[str]) -> str:
    """Returns the text of `characters`, some of which may be escaped, with at most `MOST` characters and an ellipsis if
    it is longer."""
    text = ""
    for character in characters:
        if len(text) + len(character) > MOST:
            return f"{text}..."
        text += character
    return text


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer of a server that did not accept a message."""

    reason: str
    again: bool
    """True if the server may accept the message later."""
    pause_s: float = 0.0
    """Shortest pause in seconds until then, unless the response has a header Retry-After."""


def refusal_of(status: int, content: bytes, form: Form) -> Refused | None:
    """Returns the refusal of a server; None if it accepted the message. `status`, `content`: HTTP status and body of
    its response. Feishu and Lark give the reason as a code other than 0 in the body, with any status."""
    code = _code(content) if form == "feishu" else 0
    if code in BUSY_CODES:
        return Refused(f"code {code}", True, BUSY_S)
    if status >= 300 and code in (0, None):
        return Refused(f"HTTP status {status}", status in RETRIED)
    if code is None:
        return Refused("an answer that is no JSON object", False)
    return Refused(f"code {code}", status in RETRIED) if code else None


def _code(content: bytes) -> object:
    """Returns the code in an answer of Feishu or Lark, 0 if the message was accepted; None if the answer is no JSON
    object."""
    with suppress(ValueError):
        answer = json.loads(content)
        if isinstance(answer, dict):
            return answer.get("code", answer.get("StatusCode", 0))
    return None

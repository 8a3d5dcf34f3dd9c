"""Forms in which a webhook receives an event: as JSON, or as a message for Slack, Feishu or Lark."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
BUSY_CODES = (9499, 11232, 2200)
"""Codes by which Feishu and Lark refuse a message that they may accept later: two for too many messages, 5 in a second
or 100 in a minute, and one for internal errors. Others, such as 19024 for a missing keyword and 19021 for a wrong
signature, are final."""
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
    """Answer of a server that did not accept a message although its status is below 300."""

    reason: str
    again: bool = False
    """True if the server may accept the message later."""


def refusal_of(content: bytes, form: Form) -> Refused | None:
    """Returns the refusal of a server that answered with a status below 300; None if it accepted the message. Feishu
    and Lark give the reason as a code other than 0 in the body."""
    if form != "feishu":
        return None
    try:
        answer = json.loads(content)
    except ValueError:
        return Refused("an answer that is not JSON")
    if not isinstance(answer, dict):
        return Refused("an answer that is no JSON object")
    code = answer.get("code", answer.get("StatusCode", 0))
    if code == 0:
        return None
    return Refused(f"code {code}", code in BUSY_CODES)

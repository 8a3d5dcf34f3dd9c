"""Configuration section `alerts`: which alerts a run gives, and in which form the webhook gets events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from slimx.config.section import Section

if TYPE_CHECKING:
    from slimx.config.schema import CoreConfig

AlertName = Literal[
    "no_signal",
    "gap",
    "reward_fell",
    "heldout_fell",
    "entropy",
    "truncated",
    "stale",
    "drops",
    "disk",
    "gpu",
]


class AlertSettings(Section):
    disabled: tuple[AlertName, ...] = ()
    """Names of alerts that the run does not give."""
    webhook_form: Literal["auto", "json", "slack", "feishu"] = "auto"
    """Form in which events are posted to track.webhook. json: an object with all fields of the event; slack: a message
    for an incoming webhook of Slack; feishu: a text message for a custom bot of Feishu or Lark; auto: slack or feishu
    if the URL's host is theirs (hooks.slack.com, open.feishu.cn, open.larksuite.com), otherwise json."""


def settings_of(config: CoreConfig) -> AlertSettings:
    """Returns the `alerts` section of a run's configuration."""
    return config.alerts  # type: ignore[attr-defined]  # a field that the entry point in slimx.sections adds

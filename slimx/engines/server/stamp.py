"""The text by which a server's weights bear their version: a number, or one for each policy whose adapters it has.

    "7"                   of the one policy that a server serves
    "actor=7,judge=6"     of several, each of which publishes versions of its own (docs/policies.md)

SGLang keeps one text for all weights, and tells which of its tokens were sampled under which.
"""

from __future__ import annotations

from collections.abc import Mapping


def stamp(versions: Mapping[str, int]) -> str:
    """The text that stands for the versions of several policies."""
    return ",".join(f"{policy}={version}" for policy, version in versions.items())


def stamped(text: str, policy: str | None) -> str:
    """The version of `policy` in a text that stands for several, "" if nothing of it was published; with None, `text`
    itself, which then stands for one."""
    if policy is None:
        return text
    return dict(each.split("=", 1) for each in text.split(",") if "=" in each).get(policy, "")

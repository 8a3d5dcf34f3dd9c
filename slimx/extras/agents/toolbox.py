"""The interface of tools that a rollout may call: those of an MCP server, or of another project's environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slimx.data.records import Prompt
from slimx.data.whole import Json
from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer of one call."""

    text: str
    """The text that the model reads."""
    error: str | None = None
    """Code of what went wrong, by which it is counted; None for a call that went well."""
    left_out: int = 0
    """Pictures, sounds and other parts that are no text, for which the text has a placeholder."""


class ToolsLost(SlimxError):
    """Raised by a toolbox that can be called no more: its server has died, or does not answer. It ends the rollout."""

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="tools.lost", about=about)


class Toolbox(Protocol):
    """One per rollout. `open` comes first and `close` last, also after an error or a deadline; calls come one by one.

    Class methods `check(**toolbox_options)` and `check_prompts(prompts, **toolbox_options)`, if there are any, are
    called before the run starts; so is `needs_seconds(prompts, **toolbox_options)`, the seconds that `open` and `judge`
    may take. An attribute `unjudged`, if `judge` sets it, says why what the model left got no verdict; it is counted in
    `tool_errors`."""

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Begin; the tools as the chat template shows them, {"type": "function", "function": {"name", ...}}. `seed` is
        the rollout's own, the same in a resumed run. Raises ToolsLost."""
        ...

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Call one of the tools that `open` named. It may be cancelled at a deadline. Raises ToolsLost."""
        ...

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Parts of the rollout's reward by name, {} for none; a reward hook adds them.

        `messages`: what came after the prompt, in OpenAI's form. Raises ToolsLost."""
        ...

    async def close(self) -> None:
        """End what `open` began."""
        ...

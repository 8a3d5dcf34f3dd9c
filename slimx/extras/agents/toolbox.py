"""The interface of a rollout's tools: those of an MCP server, or of another project's environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.json_types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one call."""

    text: str
    """The text for the model."""
    error: str | None = None
    """Error code, for counting; None if the call succeeded."""
    left_out: int = 0
    """Number of non-text parts (images, audio), for which the text has placeholders."""


class ToolsLost(SlimxError):
    """Raised by a toolbox that is no longer usable: its server has died, or does not respond. It ends the rollout."""

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="tools.lost", about=about)


class Toolbox(Protocol):
    """The tools of one rollout. `open` is called first and `close` last, also after an error or a deadline; calls are
    sequential.

    Optional class methods are called before the run starts: `check(**toolbox_options)`,
    `check_prompts(prompts, **toolbox_options)`, and `needs_seconds(prompts, **toolbox_options)`, which returns the
    seconds that `open` and `judge` may take. `judge` may set an attribute `unjudged`, the reason why there is no
    verdict; it is counted in `tool_errors`."""

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Starts the tools and returns them in the chat template's form, {"type": "function", "function": {"name",
        ...}}. `seed`: the rollout's, the same in a resumed run. Raises ToolsLost."""
        ...

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Calls one of the tools that `open` returned. May be cancelled at a deadline. Raises ToolsLost."""
        ...

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Returns parts of the rollout's reward by name, {} for none; a reward hook adds them.

        `messages`: the messages after the prompt, in OpenAI's form. Raises ToolsLost."""
        ...

    async def close(self) -> None:
        """Ends the tools that `open` started."""
        ...

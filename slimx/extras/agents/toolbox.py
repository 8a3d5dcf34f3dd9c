"""The interface of toolboxes: the tools of one rollout, from an MCP server or an environment of another project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.json_types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Outcome of one tool call: text for the model and, on failure, an error code."""

    text: str
    """Text that the model receives."""
    error: str | None = None
    """Error code, under which the error is counted; None if the call succeeded."""
    left_out: int = 0
    """Number of parts that cannot be shown, such as audio, for which the text contains placeholders."""
    images: Sequence[object] = ()
    """Images that follow the text, in the forms of `RolloutContext.turn_with_images`. In a run without
    `trainer.vision`, a placeholder replaces each of them."""


class ToolsLost(SlimxError):
    """Raised by a toolbox whose server has died or does not respond. The rollout is then given up."""

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="tools.lost", about=about)


class Toolbox(Protocol):
    """Interface of the tools of one rollout.

    `open` is called first and `close` last, also after an error or a deadline. Calls are sequential.

    Optional class methods are called before the run starts: `check(**toolbox_options)`, `check_prompts(prompts,
    **toolbox_options)`, and `needs_seconds(prompts, **toolbox_options)`, which returns the maximum time in seconds that
    `open` and `judge` take. `judge` may set an attribute `unjudged`, the reason why it could not verify the rollout,
    which is then counted in `tool_errors`.
    """

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Starts the tools and returns them in the chat template's format, {"type": "function", "function": {"name",
        ...}}.

        `seed`: random seed for the rollout; a resumed run passes the same one. Raises ToolsLost if the tools cannot be
        used.
        """
        ...

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Calls one of the tools that `open` returned. May be cancelled at a deadline.

        Raises ToolsLost if the tools can no longer be used.
        """
        ...

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Returns the parts of the rollout's reward by name; the reward hook `tools` adds them up. {} means that there
        is no reward.

        `messages`: messages after the prompt, in OpenAI's format. Raises ToolsLost if the tools can no longer be used.
        """
        ...

    async def close(self) -> None:
        """Stops the tools that `open` started."""
        ...

"""The client, tokenizer and vocabulary of a policy, and the server through which agents sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.rollout import Proxy
from slimx.data.chat.tokens import PromptIds
from slimx.models.families import ModelSpec
from slimx.rollout.hooks import AgentServer, Generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PolicyClient:
    """Client, tokenizer and vocabulary size of a trained policy."""

    client: Generator | None
    """Client of the policy's engines; None if the run samples nothing."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy's model."""
    vocabulary: int | None = None
    """Vocabulary size of the policy's model; None if it is unknown."""
    encode: Callable[[PreTrainedTokenizerBase], PromptIds] = PromptIds
    """Function that returns the encoder of one group's prompt."""


def policy_client(
    config: Config,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    client: Generator | None,
    stack: AsyncExitStack,
) -> PolicyClient:
    """Returns the client, tokenizer and vocabulary size of the policy with the configuration `config`. `stack`: closes
    the preparation of images, if the policy has one."""
    encode: Callable[[PreTrainedTokenizerBase], PromptIds] = PromptIds
    if config.trainer.vision is not None:
        images = entry_points.load("slimx.images", "vision")(config, spec)
        stack.callback(images.close)
        encode = images.prompt_ids
    return PolicyClient(client, tokenizer, spec.vocab_size, encode)


def make_agent_server(settings: Proxy, context: int) -> AgentServer:
    """Creates the server through which agents sample, with the entry point of `slimx.agent_servers`. `context`: maximum
    length of a trajectory in tokens."""
    return entry_points.load("slimx.agent_servers", "http")(settings.host, settings.port, context=context)

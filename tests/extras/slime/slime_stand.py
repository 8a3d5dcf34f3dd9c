"""Shared by the tests of slime's hooks: an engine that gives prepared answers, and the hooks' context."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimx.data.records import Prompt
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RolloutContext
from tests.unit.rollout.rollout_stand import rollout_context, the_tokenizer

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}], answer="46", metadata={"level": 1})
END = 3


class Scripted:
    """Answers with given texts (or ids), and remembers what it was asked. Token i of all answers has log-prob
    -(i + 1) / 8; versions change after the first token of each answer."""

    url = "http://127.0.0.1:31000"

    def __init__(self, *answers: str | list[int]) -> None:
        self.answers, self.count = list(answers), 0
        self.requests: list[tuple[list[int], dict[str, Any], int]] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        token_ids = list(request.token_ids)
        self.requests.append((token_ids, request.sampling, request.seed))
        answer = self.answers.pop(0)
        ids = [*ids_of(answer), END] if isinstance(answer, str) else answer
        logprobs = -(self.count + 1 + np.arange(len(ids), dtype=np.float32)) / 8
        self.count += len(ids)
        versions = [(0, 1, 6), (1, len(ids), 7)] if len(ids) > 1 else [(0, 1, 6)]
        routes = np.arange(len(token_ids) + len(ids) - 1, dtype=np.uint8).reshape(-1, 1, 1).repeat(2, 1)
        return Completion(
            np.array(ids, np.int32),
            logprobs,
            versions,
            "stop",
            routes if request.routed_experts else None,
            0,
            0.1,
        )


def ids_of(text: str) -> list[int]:
    return the_tokenizer()(text, add_special_tokens=False).input_ids


def context(engine: Any, *, routed: bool = True, sampling: dict[str, Any] | None = None) -> RolloutContext:
    parameters = {"temperature": 1.0, "max_new_tokens": 32} | (sampling or {})
    return rollout_context(engine, parameters, routed=routed, version=7, group_id="4", index=1, address=engine.url)

"""An engine that answers from a script, for hooks that generate."""

from __future__ import annotations

import numpy as np

from slimx.data.records import Prompt
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RolloutContext
from tests.unit.rollout.rollout_stand import rollout_context, the_tokenizer

END = 3
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}], answer="46")


class ScriptedEngine:
    """Answers with given texts, in order, and remembers what it was asked."""

    def __init__(self, *answers: str, finish_reason: str = "stop"):
        self.tokenizer, self.answers, self.finish_reason = the_tokenizer(), list(answers), finish_reason
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.prompts.append(list(request.token_ids))
        self.seeds.append(request.seed)
        ids = self.tokenizer(self.answers.pop(0), add_special_tokens=False).input_ids
        ids += [END] if self.finish_reason == "stop" else []
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=[(0, len(ids), 7)],
            finish_reason=self.finish_reason,
            routed_experts=None,
            cached_tokens=0,
            seconds=0.1,
            policy=request.policy,
        )


def context(engine: ScriptedEngine) -> RolloutContext:
    return rollout_context(engine, {"temperature": 1.0}, version=7)


def spans(trajectory) -> list[tuple[str, int, str]]:
    tokenizer = the_tokenizer()
    return [(s.source, s.turn, tokenizer.decode(trajectory.token_ids[s.start : s.stop])) for s in trajectory.spans]

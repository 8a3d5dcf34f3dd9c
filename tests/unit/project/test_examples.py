"""The examples that users copy: token provenance through one and two turns, under the quickstart's chat template."""

from __future__ import annotations

import numpy as np
import pytest

from examples import single_turn, two_turn
from slimx.data.records import Prompt
from slimx.data.tokens import encode_turn
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RewardContext, RolloutContext, RolloutEngine
from tools.quickstart.make_model import make_tokenizer

END = 3
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}], answer="46")


class ScriptedEngine:
    """Answers with given texts, in order, and remembers what it was asked."""

    def __init__(self, *answers: str, finish_reason: str = "stop"):
        self.tokenizer, self.answers, self.finish_reason = make_tokenizer(), list(answers), finish_reason
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
        )


def context(engine: ScriptedEngine) -> RolloutContext:
    return RolloutContext(
        engine=RolloutEngine(engine, {"temperature": 1.0}, seed=5, routed_experts=False),
        tokenizer=engine.tokenizer,
        version=7,
        evaluation=False,
        seed=5,
        group_id="g0",
        index=0,
    )


def spans(trajectory) -> list[tuple[str, int, str]]:
    tokenizer = make_tokenizer()
    return [(s.source, s.turn, tokenizer.decode(trajectory.token_ids[s.start : s.stop])) for s in trajectory.spans]


async def test_single_turn_keeps_prompt_and_answer_apart():
    engine = ScriptedEngine("46")
    trajectory = await single_turn.generate(context(engine), PROMPT)
    assert spans(trajectory) == [("prompt", 0, "<user>12+34=<assistant>"), ("sampled", 0, "46<end>")]
    assert trajectory.loss_mask.tolist() == [0] * 8 + [1] * 3


async def test_a_right_answer_gets_no_second_turn():
    engine = ScriptedEngine("46")
    trajectory = await two_turn.generate(context(engine), PROMPT)
    assert len(engine.prompts) == 1 and trajectory.metadata == {"answer": "46", "turns": 1}


async def test_a_wrong_answer_is_kept_and_followed_by_the_hint_and_a_second_answer():
    engine = ScriptedEngine("56", "46")
    trajectory = await two_turn.generate(context(engine), PROMPT)
    assert spans(trajectory) == [
        ("prompt", 0, "<user>12+34=<assistant>"),
        ("sampled", 0, "56<end>"),
        ("inserted", 1, "<user>Try again.<assistant>"),
        ("sampled", 1, "46<end>"),
    ]
    assert engine.prompts[1] == trajectory.token_ids[:-3].tolist()  # the second request continues the very same ids
    assert engine.seeds[0] != engine.seeds[1]
    trained = "".join(text for (source, _, text) in spans(trajectory) if source == "sampled")
    assert make_tokenizer().decode(trajectory.token_ids[trajectory.loss_mask == 1]) == trained
    assert np.isnan(trajectory.logprobs[trajectory.loss_mask == 0]).all()


async def test_an_answer_that_was_cut_off_gets_no_second_turn():
    trajectory = await two_turn.generate(context(ScriptedEngine("5", finish_reason="length")), PROMPT)
    assert trajectory.metadata["turns"] == 1 and trajectory.status == "truncated"


@pytest.mark.parametrize(("answers", "reward"), [(("46",), 1.0), (("56", "46"), 0.5), (("56", "57"), 0.0)])
async def test_an_answer_that_needed_the_hint_counts_half(answers, reward):
    engine = ScriptedEngine(*answers)
    trajectory = await two_turn.generate(context(engine), PROMPT)
    parts = await two_turn.reward(RewardContext(PROMPT, engine.tokenizer, "", False), trajectory)
    assert sum(parts.values()) == reward


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The two usual shapes: an end token with a line break after it, and a template without one.
        (
            "{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}{{ '<user>assistant\n' }}",
            "\n<user>user\nTry again.<end>\n<user>assistant\n",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
            "\nuser: Try again.\nassistant: ",
        ),
    ],
)
def test_the_next_turn_follows_any_chat_template(template, expected):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert tokenizer.decode(encode_turn(tokenizer, "Try again.", role="user", after=[END])) == expected

"""Turns and final answer of a trajectory, by a real tokenizer: with marks of thinking as special tokens and as text."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from slimx.data.chat.responses import Response, final_answer, read_response
from slimx.data.records import Span, Trajectory
from slimx.rollout.hooks import RewardContext
from tests.unit.rollout.rollout_stand import prompts, the_tokenizer

MARKS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]


def tokenizer(*, special: bool):
    made = copy.deepcopy(the_tokenizer())
    if special:
        made.add_special_tokens({"additional_special_tokens": MARKS})
    else:
        made.add_tokens(MARKS)
    return made


def trajectory(tokenizer, *parts: tuple[str, str]) -> Trajectory:
    """Returns a trajectory of parts (source, text)."""
    ids, spans = [], []
    for source, text in parts:
        start = len(ids)
        ids += tokenizer.encode(text, add_special_tokens=False)
        spans.append(Span(start=start, stop=len(ids), source=source, version=0 if source == "sampled" else None))
    count = len(ids)
    return Trajectory(
        id="t",
        rollout_id="r",
        group_id="g",
        index=0,
        token_ids=np.array(ids, np.int32),
        loss_mask=np.zeros(count, np.uint8),
        logprobs=np.zeros(count, np.float32),
        spans=spans,
    )


PROMPT = ("prompt", "<user>1+1<assistant>")
OPEN = ("prompt", "<user>1+1<assistant><think>\n")
TURN = ("inserted", "<end><user>go on<assistant>")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("parts", "turns", "answer"),
    [
        ([PROMPT, ("sampled", "2<end>")], 1, "2"),
        ([PROMPT, ("sampled", "1<end>"), TURN, ("sampled", "2<end>")], 2, "2"),
        ([PROMPT, ("sampled", "1"), ("sampled", "2<end>")], 1, "12"),  # one turn of two weight versions
        ([PROMPT, ("sampled", "<think>5</think>7<end>")], 1, "7"),
        ([PROMPT, ("sampled", "<think>5")], 1, ""),
        ([PROMPT, ("sampled", "<think>5</think>7<think>8")], 1, ""),
        ([OPEN, ("sampled", "5</think>7<end>")], 1, "7"),
        ([OPEN, ("sampled", "5")], 1, ""),
        ([OPEN, ("sampled", "5"), ("inserted", "wait"), ("sampled", "6")], 2, ""),
        ([OPEN, ("sampled", "5"), ("inserted", "</think>"), ("sampled", "6<end>")], 2, "6"),
        ([OPEN, ("sampled", "5<end>"), TURN, ("sampled", "6<end>")], 2, "6"),
        ([("prompt", "use <think> tags<assistant>"), ("sampled", "6<end>")], 1, "6"),
    ],
)
def test_the_final_answer_is_the_end_of_the_last_turn_behind_its_thinking(special, parts, turns, answer):
    maker = tokenizer(special=special)
    response = read_response(trajectory(maker, *parts), maker)
    assert (len(response.turns), response.final_answer) == (turns, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>7<|end|>", "7"),
        ("<|channel|>analysis<|message|>5", ""),
    ],
)
def test_the_final_channel_of_the_harmony_format_is_the_answer(text, answer):
    maker = tokenizer(special=True)
    assert final_answer(text) == answer
    assert read_response(trajectory(maker, PROMPT, ("sampled", text)), maker).final_answer == answer


def test_a_context_parts_turns_and_has_the_answer_of_each_trajectory():
    maker = tokenizer(special=False)
    two = read_response(trajectory(maker, PROMPT, ("sampled", "1<end>"), TURN, ("sampled", "2<end>")), maker)
    one = read_response(trajectory(maker, PROMPT, ("sampled", "<think>3</think>4<end>")), maker)
    ctx = RewardContext(prompts()[0], maker, two.text, False, {}, [two, one])
    assert (ctx.text, ctx.turns, ctx.final_answer) == ("1\n2", ("1", "2"), "2")
    assert (ctx.texts, ctx.final_answers) == (["1\n2", "<think>3</think>4"], ["2", "4"])


def test_a_trajectory_that_was_not_sampled_has_no_answer():
    maker = the_tokenizer()
    response = read_response(trajectory(maker, PROMPT, ("inserted", "2")), maker)
    assert (response.turns, response.text, response.final_answer) == ((), "", "")


def test_a_context_decodes_when_a_hook_first_reads_a_text():
    read: list[str] = []

    def decode() -> Response:
        read.append("once")
        return Response(("1", "2"), "2")

    ctx = RewardContext(prompts()[0], None, "", False)
    ctx.read_later([decode])
    assert not read
    assert (ctx.text, ctx.turns, ctx.final_answers) == ("1\n2", ("1", "2"), ["2"])
    assert read == ["once"]
    with pytest.raises(AttributeError):
        _ = ctx.unknown

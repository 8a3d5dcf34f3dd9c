"""Reads a trajectory as text: the turns that were sampled, and the final answer, which rewards grade."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slimx.data.records import Trajectory

THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"
CHANNEL = "<|channel|>"
"""Begins each message of the Harmony format (gpt-oss), of which those in the channel `final` answer."""
_FINAL = re.compile(r"<\|channel\|>\s*final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_MESSAGE_ENDS = re.compile(r"<\|(?:end|return|call)\|>")
_TAIL = 16
"""Tokens before a turn that show whether the chat template opened the model's thinking."""


@dataclass(frozen=True, slots=True)
class Response:
    """A trajectory as text, special tokens left out."""

    turns: tuple[str, ...]
    """Text of each run of sampled tokens between inserted ones."""
    final_answer: str
    """End of the last turn, behind its thinking; "" where the thinking never ended."""

    @property
    def text(self) -> str:
        """All turns, with a line break between them."""
        return "\n".join(self.turns)


def final_answer(text: str, *, thinking: bool = False) -> str:
    """Returns the part of a turn behind its thinking: behind the last </think>, in the Harmony format the last message
    of the channel `final`, all of it where nothing was thought, and "" where the thinking never ended.

    `thinking`: True for a turn that begins inside of thinking, because the chat template opened it."""
    if CHANNEL in text:
        ends = [found.end() for found in _FINAL.finditer(text)]
        return _MESSAGE_ENDS.split(text[ends[-1] :], maxsplit=1)[0] if ends else ""
    return "" if _is_thinking(text, thinking) else text.rpartition(THOUGHT_ENDS)[2]


def read_response(trajectory: Trajectory, tokenizer: Any) -> Response:
    """Returns the response of a trajectory, decoded by its policy's tokenizer."""
    ids, runs = trajectory.token_ids, _sampled_runs(trajectory)
    turns: list[str] = []
    thinking, before = False, 0
    for start, stop in runs:
        if turns:
            thinking = _is_thinking(turns[-1], thinking) and _goes_on(tokenizer, ids[before:start])
        # As an array: of a list transformers would look at the type of every id.
        tail = tokenizer.decode(ids[max(before, start - _TAIL) : start], skip_special_tokens=False)
        thinking = thinking or tail.rstrip().endswith(THOUGHT_BEGINS)
        turns.append(tokenizer.decode(ids[start:stop], skip_special_tokens=True))
        before = stop
    last = ids[slice(*runs[-1])] if runs else ids[:0]
    return Response(tuple(turns), _answer(tokenizer, last, turns[-1], thinking) if turns else "")


def _sampled_runs(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[start, stop) of the sampled tokens between others; weight versions do not part them."""
    sampled = [span for span in trajectory.spans if span.source == "sampled" and span.stop > span.start]
    gaps = [number for number, (a, b) in enumerate(pairwise(sampled), start=1) if a.stop != b.start]
    return [(sampled[a].start, sampled[b - 1].stop) for a, b in pairwise([0, *gaps, len(sampled)]) if a < b]


def _is_thinking(text: str, thinking: bool) -> bool:
    """Returns True if a turn ends inside of thinking."""
    _, ended, rest = text.rpartition(THOUGHT_ENDS)
    return THOUGHT_BEGINS in rest or (thinking and not ended)


def _goes_on(tokenizer: Any, inserted: Any) -> bool:
    """Returns True if inserted tokens leave the model in its thinking, as a hint does and a new turn does not."""
    raw = tokenizer.decode(inserted, skip_special_tokens=False)
    return THOUGHT_ENDS not in raw and raw == tokenizer.decode(inserted, skip_special_tokens=True)


def _answer(tokenizer: Any, ids: Any, text: str, thinking: bool) -> str:
    """Returns the final answer of a turn; `text` is its text without special tokens, which marks of thinking may be."""
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in (THOUGHT_BEGINS, THOUGHT_ENDS, CHANNEL)]
    if THOUGHT_ENDS in text or not any(mark is not None and (ids == mark).any() for mark in marks):
        return final_answer(text, thinking=thinking)
    answer = final_answer(tokenizer.decode(ids, skip_special_tokens=False), thinking=thinking)
    for special in tokenizer.all_special_tokens:
        answer = answer.replace(special, "")
    return answer

"""Decoding of trajectories to text: the sampled turns, and the final answer that rewards grade."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slimx.data.records import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT_BEGINS = "<think>"
THOUGHT_ENDS = "</think>"
CHANNEL = "<|channel|>"
"""Token that precedes the channel name of each message in the Harmony format (gpt-oss); messages in the channel `final`
are answers."""
_FINAL = re.compile(r"<\|channel\|>\s*final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_MESSAGE_ENDS = re.compile(r"<\|(?:end|return|call)\|>")
_TAIL = 16
"""Number of tokens before a turn that are decoded to find out whether the chat template opened the model's thinking."""


@dataclass(frozen=True, slots=True)
class Response:
    """Sampled text of a trajectory, without special tokens."""

    turns: tuple[str, ...]
    """Text of each turn. A turn is a sequence of consecutive sampled tokens; inserted tokens separate turns."""
    final_answer: str
    """Text of the last turn after its thinking; "" if the thinking did not end."""

    @property
    def text(self) -> str:
        """Text of all turns, joined by line breaks."""
        return "\n".join(self.turns)


def final_answer(text: str, *, thinking: bool = False) -> str:
    """Returns the answer in a turn's `text`: the text after the last </think>, or, in the Harmony format, the last
    message of the channel `final`. Without thinking, the answer is the whole text; if the thinking did not end, the
    answer is "".

    `thinking`: True for a turn that begins inside thinking, because the chat template opened it."""
    if CHANNEL in text:
        starts = [match.end() for match in _FINAL.finditer(text)]
        return _MESSAGE_ENDS.split(text[starts[-1] :], maxsplit=1)[0] if starts else ""
    return "" if _is_thinking(text, thinking) else text.rpartition(THOUGHT_ENDS)[2]


def read_response(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Response:
    """Decodes the sampled turns of a trajectory. `tokenizer`: tokenizer of the policy that sampled it."""
    ids = trajectory.token_ids
    runs = _sampled_runs(trajectory)
    if not runs:
        return Response((), "")
    turns: list[str] = []
    thinking = False
    before = 0
    for start, stop in runs:
        if turns:
            thinking = _is_thinking(turns[-1], thinking) and _continues(tokenizer, ids[before:start])
        # An array, because transformers checks the type of every id in a list.
        tail = _decode(tokenizer, ids[max(before, start - _TAIL) : start], skip_special_tokens=False)
        thinking = thinking or tail.rstrip().endswith(THOUGHT_BEGINS)
        turns.append(_decode(tokenizer, ids[start:stop], skip_special_tokens=True))
        before = stop
    return Response(tuple(turns), _answer(tokenizer, ids[slice(*runs[-1])], turns[-1], thinking))


def _sampled_runs(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Returns the range [start, stop) of each sequence of consecutive sampled tokens. A sequence may include tokens of
    several weight versions."""
    runs: list[tuple[int, int]] = []
    for span in trajectory.spans:
        if span.source != "sampled" or span.stop <= span.start:
            continue
        if runs and runs[-1][1] == span.start:
            runs[-1] = (runs[-1][0], span.stop)
        else:
            runs.append((span.start, span.stop))
    return runs


def _is_thinking(text: str, thinking: bool) -> bool:
    """Returns True if the text of a turn ends inside an unfinished thinking section. `thinking`: True if the turn began
    inside one."""
    _, ended, rest = text.rpartition(THOUGHT_ENDS)
    return THOUGHT_BEGINS in rest or (thinking and not ended)


def _continues(tokenizer: PreTrainedTokenizerBase, inserted: np.ndarray) -> bool:
    """Returns True if the model's thinking continues after the `inserted` tokens, for example after a hint. Thinking
    ends if the inserted tokens contain </think>, or special tokens, which open a new turn."""
    raw = _decode(tokenizer, inserted, skip_special_tokens=False)
    return THOUGHT_ENDS not in raw and raw == _decode(tokenizer, inserted, skip_special_tokens=True)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, *, skip_special_tokens: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _answer(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, text: str, thinking: bool) -> str:
    """Returns the final answer of a turn. `ids`: tokens of the turn. `text`: `ids` decoded without special tokens;
    <think> and </think> remain in it if the tokenizer does not treat them as special. `thinking`: True if the turn
    began inside thinking."""
    if THOUGHT_ENDS in text or not _has_special_marks(tokenizer, ids):
        return final_answer(text, thinking=thinking)
    answer = final_answer(_decode(tokenizer, ids, skip_special_tokens=False), thinking=thinking)
    for special in tokenizer.all_special_tokens:
        answer = answer.replace(special, "")
    return answer


def _has_special_marks(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> bool:
    """Returns True if `ids` contain <think>, </think> or <|channel|> as a single token."""
    for mark in (THOUGHT_BEGINS, THOUGHT_ENDS, CHANNEL):
        mark_id = tokenizer.convert_tokens_to_ids(mark)
        if mark_id is not None and (ids == mark_id).any():
            return True
    return False
